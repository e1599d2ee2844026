"""A change of a shard's memory, interrupted anywhere, is finished by the next life bit for bit."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kills import dying_at
from tests.store.conftest import CutParts
from zmqtrain.errors import ConfigError
from zmqtrain.optim import LAMB, SGD, Adafactor, Adam, Flat, Momentum, Muon, Update, redo, whole
from zmqtrain.optim.outer import CLOSES, RESIDUAL, Outer
from zmqtrain.protocol.orders import Accumulate, Apply, Reduce
from zmqtrain.store import changes
from zmqtrain.store import shard as shards
from zmqtrain.store.holdings import dense, dense_part
from zmqtrain.store.layout import ShardLayout, Variable
from zmqtrain.store.placement import place
from zmqtrain.store.segment import Segment
from zmqtrain.store.segment_layout import CLOCK, ORDERS
from zmqtrain.store.shard import Shard, segment_layout

BLOCK = 4096
"""Elements that are changed at once."""

VARIABLES = (
    Variable("w", (BLOCK // 4, 8)),
    Variable("b", (1005,)),
    Variable("mean", (7,), "float32", "state"),
    Variable("count", (2,), "int64", "state"),
)
"""What is trained takes two whole blocks and a part of one; the last two are state."""

SIZE = place(VARIABLES, 1, partition_nbytes=0)[0].size

UPDATE = Update(Adam(0.1), moving_average=0.9, fused=False)
"""In NumPy, where it can be interrupted at every line; for compiled loops see test_guarded.py."""

LAYERED = Update(
    LAMB(0.1), l2=0.1, clip_norm=0.5, groups={"b": {"optimizer": Adam(0.1)}}, fused=False
)
"""With norms of the variable and of the mean, which the interrupted update has changed in part."""

GROUPED = Update(
    Adam(0.1), groups={"b": {"optimizer": Momentum(0.1), "l2": 0.1}}, clip_norm=0.5, fused=False
)
"""With another rule, and other slots, for the second variable."""

ABSENT = Update(Adam(0.1), moving_average=0.9, groups=GROUPED.groups, clip_norm=0.5, fused=False)
"""Without any gradient of the first variable, which takes two whole blocks."""

MATRIX = Update(
    Muon(0.1),
    groups={"b": {"optimizer": Adafactor(0.1, weight_decay=0.1), "l2": 0.1}},
    moving_average=0.9,
    clip_norm=0.5,
    fused=False,
)
"""With directions of whole variables, which the interrupted update has changed in part."""

OUTER = Update(Adam(0.1), outer=Outer(Momentum(0.7, 0.5, nesterov=True)), fused=False)
"""With a rule, and a slot, for the results of local steps."""

INTERRUPTED = (
    shards.__file__,
    changes.__file__,
    dense.__file__,
    dense_part.__file__,
    whole.__file__,
    redo.__file__,
)


@pytest.fixture(autouse=True)
def _small_blocks(cut_parts: CutParts) -> None:
    cut_parts(block_size=BLOCK)


def layout() -> ShardLayout:
    return place(VARIABLES, 1, partition_nbytes=0)[0]


def begin(path: Path, update: Update = UPDATE) -> Shard:
    segment = Segment.create(segment_layout(layout(), update), path)
    shard = Shard(layout(), update, segment, safe=True)
    shard.initialize(np.ones(SIZE, np.float32))
    for worker in range(3):
        shard.segment.gradient(worker)[:] = gradient(worker)
        if update is ABSENT:
            shard.segment.gradient(worker)[: 2 * BLOCK] = 0
            shard.segment.note_absent(worker, [0])
    stage(shard)
    return shard


def stage(shard: Shard) -> None:
    for worker in range(3):
        shard.stage(worker, worker, sequence=worker + 1, weight=worker + 0.3)


def gradient(worker: int) -> Flat:
    return np.random.default_rng(worker).standard_normal(SIZE, np.float32)


def adopt(path: Path, update: Update = UPDATE) -> Shard:
    segment = Segment.adopt(segment_layout(layout(), update), path)
    assert segment is not None
    return Shard(layout(), update, segment, safe=True)


def contents(shard: Shard) -> tuple[Any, ...]:
    arrays = [shard.parameters, *shard.slots.values()]
    if shard.accumulated:
        arrays.append(shard.segment.sum)
    missed = shard.dense.missed
    return shard.version, shard.accumulated, missed, *(array.tobytes() for array in arrays)


@dataclass(frozen=True)
class OnlyOnce:
    """A schedule that has a rate for the first update alone."""

    def __call__(self, step: int) -> float:
        if step > 0:
            raise ConfigError(f"no rate at step {step}")
        return 0.1


STRIDE = int(os.environ.get("STRIDE", "9"))
"""Of the lines at which a process is killed, one in so many; it begins anywhere."""

CHANGES: dict[str, Callable[[Shard], object]] = {
    "apply": lambda shard: shard.carry_out(Apply(0), 7),
    "accumulate": lambda shard: shard.carry_out(Accumulate(1), 7),
    "reduce": lambda shard: shard.carry_out(Reduce((2, 0, 1)), 7),
    "round": lambda shard: shard.carry_out(Reduce((2, 0, 1), local_steps=5), 7),
    "arrival": lambda shard: shard.carry_out(Apply(1, None, 5, among=3, cycle=CLOSES), 7),
}


def deaths(kind: str, path: Path, update: Update) -> Iterator[tuple[Shard, Shard]]:
    """Yield (the shard as a killed life's successor finds it, the one before), for every STRIDE-th
    line."""
    line = random.randrange(STRIDE)  # so that every line has its turn
    while True:
        shard = begin(path, update)
        shard.carry_out(Accumulate(2), 6)  # so that accumulate adds and reduce has a sum
        if not dying_at(line, lambda shard=shard: CHANGES[kind](shard), INTERRUPTED):  # type: ignore[misc]
            shard.segment.remove()
            return
        shard.segment.close()
        yield adopt(path, update), shard
        path.unlink()
        line += STRIDE


@pytest.mark.parametrize(
    ("kind", "update", "part_size"),
    [
        ("apply", UPDATE, SIZE),
        ("accumulate", UPDATE, SIZE // 3),
        ("reduce", LAYERED, SIZE // 3),
        ("reduce", GROUPED, SIZE // 3),
        ("reduce", MATRIX, SIZE // 3),
        ("reduce", ABSENT, SIZE // 3),
        ("round", OUTER, SIZE // 3),
        ("round", ABSENT, SIZE // 3),
        ("arrival", OUTER, SIZE // 3),
    ],
    ids=[
        *("apply", "accumulate", "reduce by LAMB", "reduce in groups", "reduce by Muon"),
        "without a gradient",
        *("round by momentum", "round of means", "arrival by momentum"),
    ],
)
def test_change_of_a_killed_process_is_finished_or_never_was(
    kind: str, update: Update, part_size: int, tmp_path: Path, cut_parts: CutParts
) -> None:
    cut_parts(part_size)
    tmp_path.chmod(0o700)
    reference = begin(tmp_path / "reference", update)
    reference.carry_out(Accumulate(2), 6)
    before = contents(reference)
    CHANGES[kind](reference)
    after = contents(reference)
    found = {True: 0, False: 0}
    for shard, _ in deaths(kind, tmp_path / "ps", update):
        last = shard.repair()
        done = shard.segment.words[ORDERS] == 7
        assert last is None or last.order == 6 + done
        assert contents(shard) == (after if done else before)
        assert shard.segment.words[CLOCK] % 2 == 0
        if not done:  # it goes on as if nothing had happened
            stage(shard)
            CHANGES[kind](shard)
            assert contents(shard) == after
        found[done] += 1
        shard.segment.close()
    assert min(found.values()) > 3
    reference.segment.remove()


SETTLING = Update(
    Adam(0.1), outer=Outer(of_differences=True, keeps_residual=True), fused=False
)  # whose parameters move on after a round


@pytest.mark.parametrize("part_size", [SIZE, SIZE // 3], ids=["whole", "in parts"])
def test_parameters_that_a_killed_process_was_settling_lose_nothing(
    part_size: int, tmp_path: Path, cut_parts: CutParts
) -> None:
    cut_parts(part_size)
    tmp_path.chmod(0o700)
    trained, path = layout().trained, tmp_path / "ps"
    line, moved = random.randrange(STRIDE), set()
    while True:
        shard = begin(path, SETTLING)
        shard.segment.slots[RESIDUAL][:trained] = 0.25
        CHANGES["round"](shard)
        before = shard.parameters.copy()
        target = np.round(before[:trained])
        if not dying_at(line, lambda s=shard, t=target: s.settle(t), INTERRUPTED):  # type: ignore[misc]
            break
        shard.segment.close()
        again = adopt(path, SETTLING)
        last, residual = again.repair(), again.segment.slots[RESIDUAL]
        assert last is not None and len(last.contributions) == 3
        assert (again.version, again.segment.words[ORDERS]) == (5, 7)
        assert again.segment.words[CLOCK] % 2 == 0
        np.testing.assert_allclose(
            again.parameters[:trained] + residual[:trained], before[:trained] + 0.25, atol=1e-6
        )
        moved.add(int((again.parameters[:trained] == target).sum()))
        again.segment.remove()
        line += STRIDE
    assert len(moved) > 2
    assert (shard.parameters[:trained] == target).all()
    assert (shard.parameters[trained:] == before[trained:]).all()
    shard.segment.remove()


@pytest.mark.parametrize(
    ("rate", "rate_of_b"),
    [(OnlyOnce(), None), (0.1, OnlyOnce()), (OnlyOnce(), 0.1)],
    ids=["all", "b", "all but b"],
)
@pytest.mark.parametrize("part_size", [SIZE, SIZE // 3], ids=["whole", "in parts"])
def test_update_that_is_refused_changes_nothing_and_is_not_finished_later(
    part_size: int, rate: Any, rate_of_b: Any, tmp_path: Path, cut_parts: CutParts
) -> None:
    cut_parts(part_size)
    groups = {"b": {"learning_rate": rate_of_b}} if rate_of_b else {}
    update = Update(SGD(rate), groups=groups)
    tmp_path.chmod(0o700)
    path = tmp_path / "ps"
    segment = Segment.create(segment_layout(layout(), update), path)
    shard = Shard(layout(), update, segment, safe=True, threads=2)
    shard.initialize(np.ones(SIZE, np.float32))
    shard.segment.gradient(0)[:] = gradient(0)
    shard.stage(0, 0)
    shard.carry_out(Apply(0))
    before = contents(shard)
    with pytest.raises(ConfigError, match="no rate at step 1"):
        shard.carry_out(Apply(0))
    assert contents(shard) == before
    segment.close()
    adopted = Segment.adopt(segment_layout(layout(), update), path)
    assert adopted is not None
    again = Shard(layout(), update, adopted, safe=True)
    last = again.repair()
    assert last is not None and last.step == 0
    assert contents(again) == before
    adopted.remove()
