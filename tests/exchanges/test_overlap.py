"""Parts of a gradient sent while the rest is computed: those complete and finite."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chunk_sizes import chunks_of
from zmqtrain.exchanges.lanes import Lane
from zmqtrain.exchanges.overlap import Overlap
from zmqtrain.store.layout import ShardLayout, Variable
from zmqtrain.store.placement import place
from zmqtrain.training.memory import WorkerMemory
from zmqtrain.wire.chunks import Chunks
from zmqtrain.wire.compression import Compressor
from zmqtrain.wire.compression.topk import TopKCompression
from zmqtrain.wire.messages import Push

CHUNK_SIZE = 10
PUSH = Push(1, 0, 7, 32, 0.5)


@dataclass
class FakeRequest:
    chunks: Chunks | None
    sent: dict[int, list[float]] = field(default_factory=dict)  # chunks as they were when sent
    completed: tuple[Push, bool] | None = None


class FakeLink:
    """Sends every chunk at once."""

    def __init__(self) -> None:
        self.requests: list[FakeRequest] = []

    def begin(self, message: None, *, chunks: Chunks, **options: Any) -> FakeRequest:
        assert message is None
        self.requests.append(FakeRequest(chunks))
        return self.requests[-1]

    def go_on(self, request: FakeRequest) -> None:
        assert request.chunks is not None
        while len(request.sent) < request.chunks.ready:
            chunk, (*_, tensor) = request.chunks[len(request.sent)]
            request.sent[chunk.index] = tensor.array().tolist()

    def complete(self, request: FakeRequest, push: Push, *, with_chunks: bool) -> None:
        request.completed = (push, with_chunks)


class Situation:
    """A worker whose gradient lies in some shards, which are cut into small chunks."""

    def __init__(self, sizes: Sequence[int], shards: int) -> None:
        variables = [Variable(f"v{number}", (size,)) for number, size in enumerate(sizes)]
        layouts = place(variables, shards, partition_nbytes=4 * 15)
        self.links = [FakeLink() for _ in layouts]
        self.lanes = list(map(_lane, self.links, layouts))
        memory = WorkerMemory(variables, layouts, [lane.gradient for lane in self.lanes])
        self._scatter = memory.scatter
        self.errors: list[Exception] = []
        self.overlap = Overlap(self.lanes, self.errors.append)
        self.out = memory.values
        for buffer in self.out.values():
            buffer[:] = np.nan  # of the step before

    def written(self, *names: str) -> None:
        """These gradients are complete."""
        self._scatter(*names)
        self.overlap.written(names)

    def complete(self) -> list[FakeRequest]:
        """Complete every push; return the requests, of shards whose gradient goes in chunks."""
        for shard in range(len(self.links)):
            self.overlap.complete(shard, PUSH)
        return [request for link in self.links for request in link.requests]


def _lane(link: Any, layout: ShardLayout) -> Lane:
    flats = np.zeros((2, layout.size), np.float32)
    return Lane(link, "tcp", layout, flats[0], flats[0], flats[1])


@pytest.fixture(autouse=True)
def small_chunks() -> Any:
    with chunks_of(CHUNK_SIZE):
        yield


@settings(max_examples=200)
@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    shards=st.integers(1, 3),
    data=st.data(),
)
def test_piece_goes_when_all_that_lies_in_it_is_written_and_not_before(
    sizes: list[int], shards: int, data: st.DataObject
) -> None:
    order = data.draw(st.permutations([f"v{number}" for number in range(len(sizes))]))
    told = data.draw(st.integers(0, len(order)))

    async def compute() -> None:
        situation = Situation(sizes, shards)
        situation.overlap.begin(1)
        for number, name in enumerate(order):
            situation.out[name][:] = number
            if number < told:
                situation.written(name, *order[:number])  # some of them once more
        await asyncio.sleep(0)  # what was told from the model's thread is heard now
        if told == len(order):  # all chunks are there, each as it is in the end
            for lane, link in zip(situation.lanes, situation.links, strict=True):
                for request in link.requests:
                    whole = [
                        value for index in sorted(request.sent) for value in request.sent[index]
                    ]
                    assert whole == lane.gradient.tolist()
        for request in situation.complete():
            assert all(np.isfinite(values).all() for values in request.sent.values())
            assert request.completed == (PUSH, True)

    asyncio.run(compute())


async def test_gradient_that_is_not_finite_does_not_go_ahead() -> None:
    situation = Situation([50, 50], 1)
    situation.overlap.begin(1)
    situation.out["v1"][:] = 1
    situation.out["v0"][:] = np.inf
    situation.written("v1", "v0")
    await asyncio.sleep(0)
    (request,) = situation.complete()
    assert sorted(request.sent) == [7, 8, 9, 10, 11]  # v1 begins at 64


async def test_push_that_is_not_finite_is_completed_without_the_rest_of_its_chunks() -> None:
    situation = Situation([50, 50], 1)
    situation.overlap.begin(1)
    situation.out["v1"][:] = 1
    situation.written("v1")
    await asyncio.sleep(0)
    push = replace(PUSH, finite=False)
    situation.overlap.complete(0, push)
    (request,) = situation.links[0].requests
    assert request.completed == (push, False)


async def test_error_of_a_gradient_that_was_not_finite_is_not_kept() -> None:
    situation = Situation([50, 50], 1)
    (lane,) = situation.lanes
    compressor = Compressor(TopKCompression(ratio=0.1), len(lane.gradient))
    situation.lanes[0] = replace(lane, compressor=compressor)
    situation.overlap.begin(1)
    situation.out["v1"][:] = 1e30
    situation.written("v1")
    await asyncio.sleep(0)
    situation.overlap.complete(0, replace(PUSH, finite=False))
    _, values = compressor.encode(70, np.ones(CHUNK_SIZE, np.float32))
    assert values.array().tolist() == [1.0]


async def test_what_goes_wrong_while_pieces_are_sent_is_told() -> None:
    situation, bug = Situation([50], 1), ValueError("a bug")
    situation.links[0].go_on = Mock(side_effect=bug)  # type: ignore[method-assign]
    situation.overlap.begin(1)
    situation.out["v0"][:] = 1
    situation.written("v0")
    await asyncio.sleep(0)
    assert situation.errors == [bug]


async def test_small_gradient_rides_in_its_push() -> None:
    situation = Situation([CHUNK_SIZE], 1)
    situation.overlap.begin(1)
    assert situation.overlap.complete(0, PUSH) is None


async def test_nothing_is_looked_for_in_a_gradient_that_does_not_travel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked = Mock(return_value=True)
    monkeypatch.setattr("zmqtrain.exchanges.overlap.all_finite", looked)
    situation = Situation([25, 25], shards=2)
    mapped: Any = object()
    situation.lanes[0] = replace(situation.lanes[0], name="shm", reached=mapped)
    situation.overlap.begin(1)
    for buffer in situation.out.values():
        buffer[:] = 1.0
    situation.written(*situation.out)
    await asyncio.sleep(0)
    assert situation.links[0].requests == []
    (request,) = situation.links[1].requests
    assert sum(map(len, request.sent.values())) == len(situation.lanes[1].gradient)
    travels = situation.lanes[1].gradient
    assert all(np.shares_memory(call.args[0], travels) for call in looked.call_args_list)
    assert situation.complete() == [request]
