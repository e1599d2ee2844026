"""A shard in parts: cut alike by everyone, changed by any number of threads, killed in any."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product, takewhile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kills import dying_at
from tests.store.conftest import CutParts
from zmqtrain.optim import Adam, Flat, Update, redo
from zmqtrain.protocol.orders import Accumulate, Apply, Reduce
from zmqtrain.store.layout import Variable
from zmqtrain.store.placement import place
from zmqtrain.store.segment import Segment
from zmqtrain.store.segment_layout import PAGE, PART_SIZE, PARTS, cut
from zmqtrain.store.shard import Shard, segment_layout

SMALL = PAGE // 4
"""Elements of the smallest part that can be cut."""


@given(st.integers(0, 20 * PART_SIZE))
def test_parts_cover_a_shard_and_differ_by_two_pages_at_most(size: int) -> None:
    parts = cut(size)
    assert len(parts) <= PARTS
    assert [part.stop for part in parts[:-1]] == [part.start for part in parts[1:]]
    assert (parts[0].start, parts[-1].stop) == (0, size)
    lengths = [part.stop - part.start for part in parts]
    assert max(lengths) - min(lengths) <= 2 * SMALL
    assert all(part.start % SMALL == 0 for part in parts)
    assert len(parts) == 1 or min(lengths) > PART_SIZE - SMALL


@pytest.mark.parametrize("safe", [True, False], ids=["safe", "unsafe"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
def test_any_number_of_threads_and_parts_gives_the_same_bits(
    fused: bool, safe: bool, cut_parts: CutParts
) -> None:
    found = set()
    for part_size, threads in [(10**6, 1), (10**6, 3), (SMALL, 1), (SMALL, 3), (3 * SMALL, 2)]:
        cut_parts(part_size)
        size = 7 * SMALL + 5
        layout = place([Variable("w", (size,))], 1, partition_nbytes=4 * size)[0]
        update = Update(Adam(0.1), moving_average=0.9, l2=0.1, fused=fused)
        segment = Segment.private(segment_layout(layout, update))
        shard = Shard(layout, update, segment, safe=safe, threads=threads)
        shard.initialize(normal(size, 7))
        for worker in range(3):
            segment.gradient(worker)[:] = normal(size, worker)
            shard.stage(worker, worker)
        shard.carry_out(Apply(1))
        shard.carry_out(Accumulate(0))
        shard.carry_out(Accumulate(1))
        shard.carry_out(Reduce((2, 1)))
        found.add((*bits(shard), segment.sum.tobytes()))
    assert len(found) == 1


def test_parts_interrupted_at_once_are_finished_each(cut_parts: CutParts) -> None:
    """A process that is killed leaves as many half done as it has threads: here two, anywhere."""
    cut_parts(SMALL, SMALL // 2)  # so that a part takes several blocks
    size, update = 3 * SMALL, Update(Adam(0.1), fused=False)
    layout = place([Variable("w", (size,))], 1, partition_nbytes=4 * size)[0]

    def begun() -> Shard:
        shard = Shard(layout, update, safe=True)
        shard.initialize(normal(size, 2))
        shard.segment.gradient(0)[:] = normal(size, 1)
        shard.dense.begin_parts(range(3))
        return shard

    def make(shard: Shard, parts: Sequence[int]) -> None:
        shard.dense.update_parts(parts, shard.step_of([0], [1.0], 0))

    def dies(shard: Shard, part: int, line: int) -> bool:
        return dying_at(line, lambda: make(shard, [part]), [redo.__file__])

    whole = begun()
    make(whole, range(3))
    lines = len(list(takewhile(lambda line: dies(begun(), 0, line), range(1000))))
    assert lines > 20
    for first, second in product(range(0, lines, 3), repeat=2):
        left = begun()
        assert dies(left, 0, first)
        assert dies(left, 2, second)
        make(left, range(3))
        assert bits(left) == bits(whole), f"killed at lines {first} and {second}"


def bits(shard: Shard) -> tuple[bytes, ...]:
    return tuple(array.tobytes() for array in (shard.parameters, *shard.slots.values()))


def normal(size: int, seed: int) -> Flat:
    return np.random.default_rng(seed).standard_normal(size, np.float32)
