"""Answers to rounds as differences: every worker has the bits of the shard, and nothing is lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chunk_sizes import chunks_of
from zmqtrain import Job
from zmqtrain.compute.arrays import Flat
from zmqtrain.data import Arrays
from zmqtrain.errors import ProtocolError
from zmqtrain.models import MLP
from zmqtrain.optim import SGD, Momentum, Update
from zmqtrain.optim.outer import RESIDUAL, Outer
from zmqtrain.protocol.orders import Reduce
from zmqtrain.server.differences import Differences
from zmqtrain.store.layout import Variable
from zmqtrain.store.placement import place
from zmqtrain.store.shard import Shard
from zmqtrain.wire.chunks import ChunkAssembler, split
from zmqtrain.wire.compression import Decompressor, make_compression
from zmqtrain.wire.messages import Chunk

VARIABLES = (
    Variable("w", (41, 3)),
    Variable("b", (5,)),
    Variable("mean", (7,), "float32", "state"),
    Variable("count", (2,), "int64", "state"),
)
(LAYOUT,) = place(VARIABLES, 1, partition_nbytes=0)
TRAINED = LAYOUT.trained


class Round:
    """A shard with two workers, whose results are small differences."""

    def __init__(self, spec: str, rule: Any = None) -> None:
        made = make_compression(spec)
        assert made is not None
        outer = Outer(rule, of_differences=True, keeps_residual=made.feedback)
        self.shard = Shard(LAYOUT, Update(SGD(0.1), outer=outer))
        self.shard.initialize(np.linspace(-1, 1, LAYOUT.size, dtype=np.float32))
        self.differences = Differences(self.shard, made)
        self.add = Decompressor(made, TRAINED).add
        self.random = np.random.default_rng(0)
        self.steps = 0

    def make(self) -> Flat:
        """Make a round; return the mean of the results."""
        self.steps += 3
        results = []
        for worker in range(2):
            result = self.random.standard_normal(LAYOUT.size).astype(np.float32) * 0.01
            self.shard.segment.gradient(worker)[:] = result
            self.shard.stage(worker, worker, sequence=self.steps)
            results.append(result)
        self.differences.carry_out(Reduce((0, 1), local_steps=3), 0)
        return np.mean(results, axis=0)

    def answer(self, version: int, out: Flat) -> None:
        """Take the answer of the last round into the parameters of this version."""
        encode = self.differences.since(version)
        assert encode is not None
        chunks, inline = split(
            self.shard.parameters, self.shard.version, encode, is_difference=True
        )
        assembler = ChunkAssembler(out, self.add)
        for chunk, tensors in chunks or ():
            assembler.take(chunk, tensors)
        assert not assembler.finish(self.shard.version, inline, is_difference=True)


@settings(max_examples=40, deadline=None)
@given(
    spec=st.sampled_from(["int8", "int8:block=8", "topk:ratio=0.1", "bf16", "fp16"]),
    chunk_size=st.sampled_from([16, 48, 1000]),
    rounds=st.integers(1, 5),
)
def test_worker_that_adds_every_difference_has_the_bits_of_the_shard(
    spec: str, chunk_size: int, rounds: int
) -> None:
    with chunks_of(chunk_size):
        job = Round(spec, Momentum(0.7, 0.5, nesterov=True))
        own = job.shard.parameters.copy()
        for number in range(rounds):
            job.make()
            job.answer(3 * number, own)
            assert own.tobytes() == job.shard.parameters.tobytes()


@pytest.mark.parametrize("spec", ["int8", "topk:ratio=0.2"])
def test_what_a_difference_leaves_out_is_in_the_residual(spec: str) -> None:
    job = Round(spec)
    expected = job.shard.parameters[:TRAINED].astype(np.float64)
    for _ in range(20):
        expected += job.make()[:TRAINED]
        both = job.shard.parameters + job.shard.segment.slots[RESIDUAL]
        np.testing.assert_allclose(both[:TRAINED], expected, atol=2e-6)
        assert (both[:TRAINED] != job.shard.parameters[:TRAINED]).any()


def test_there_is_no_difference_from_another_version_nor_after_the_last_generation() -> None:
    job = Round("int8")
    job.make()
    assert job.differences.since(0) is not None
    assert job.differences.since(1) is None
    job.make()
    assert job.differences.since(0) is None
    job.differences.forget()
    assert job.differences.since(3) is None


def test_parameters_that_are_not_finite_are_not_encoded() -> None:
    job = Round("int8")
    job.shard.parameters[0] = np.inf
    job.make()
    assert job.differences.since(0) is None
    assert np.isinf(job.shard.parameters[0])
    assert np.isfinite(job.shard.segment.slots[RESIDUAL]).all()


def test_difference_that_comes_in_pieces_and_again_is_added_once() -> None:
    with chunks_of(16):
        job = Round("int8:block=8")
        own = job.shard.parameters.copy()
        before = own.copy()
        job.make()
        encode = job.differences.since(0)
        assert encode is not None
        (*some, last), _ = split(job.shard.parameters, 3, encode, is_difference=True)  # type: ignore[misc]
        assembler = ChunkAssembler(own, job.add)
        for chunk, tensors in [*some, *some]:
            assembler.take(chunk, tensors)
        assert assembler.finish(3, (), is_difference=True) == 1
        assert own.tobytes() == before.tobytes()
        assembler.take(*last)
        assert assembler.finish(3, (), is_difference=True) == 0
        assert own.tobytes() == job.shard.parameters.tobytes()


def test_all_parameters_may_follow_pieces_of_a_difference_but_not_the_other_way_round() -> None:
    with chunks_of(16):
        job = Round("int8:block=8")
        own = job.shard.parameters.copy()
        job.make()
        encode = job.differences.since(0)
        differences, _ = split(job.shard.parameters, 3, encode, is_difference=True)  # type: ignore[arg-type]
        whole, _ = split(job.shard.parameters, 3)
        assert differences is not None and whole is not None
        assembler = ChunkAssembler(own, job.add)
        assembler.take(*differences[0])
        for part in whole:
            assert isinstance(part[0], Chunk)
            assembler.take(*part)
        assert assembler.finish(3, ()) == 0
        assert own.tobytes() == job.shard.parameters.tobytes()
        for part in differences:
            assembler.take(*part)
        with pytest.raises(ProtocolError, match="expected all parameters"):
            assembler.finish(3, (), is_difference=True)


@pytest.mark.parametrize(
    ("fields", "keeps"),
    [
        ({"policy": "local-steps:5", "compression": "int8"}, True),
        ({"policy": "local-steps:5,after=9", "compression": "topk"}, True),
        ({"policy": "local-steps:5", "compression": "bf16"}, False),
        ({"policy": "local-steps:5"}, False),
        ({"policy": "sync-replicas", "compression": "int8"}, False),
    ],
    ids=str,
)
def test_slot_is_kept_by_jobs_that_need_it_alone(fields: dict[str, Any], keeps: bool) -> None:
    data = Arrays((np.zeros((8, 5), np.float32), np.zeros(8, int)))
    job = Job(model=MLP(5, 4, 3), data=data, steps=3, optimizer=SGD(0.1), **fields)
    assert (RESIDUAL in {slot.name for slot in job.update().slots}) == keeps
