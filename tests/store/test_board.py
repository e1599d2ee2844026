"""The board: members that make steps by themselves, against a ps's updates.

For the death of one at any line see test_board_tables.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kills import dying_at
from tests.store.conftest import CutParts
from zmqtrain.models.weights import EMPTY
from zmqtrain.optim import SGD, Adam, Flat, Update, redo
from zmqtrain.protocol.orders import Reduce
from zmqtrain.store import board as boards
from zmqtrain.store import words
from zmqtrain.store.board import DONE, MADE, Board, Figures, Holder, Seat, Terms
from zmqtrain.store.board_share import owned
from zmqtrain.store.holdings import dense, dense_part
from zmqtrain.store.layout import ShardLayout, Variable
from zmqtrain.store.placement import place
from zmqtrain.store.segment import Segment
from zmqtrain.store.segment_layout import CLOCK
from zmqtrain.store.shard import Shard, segment_layout

VARIABLES = (
    Variable("w", (3000,)),
    Variable("b", (1005,)),
    Variable("mean", (7,), "float32", "state"),
    Variable("count", (2,), "int64", "state"),
)
UPDATE = Update(Adam(0.1), l2=0.01, moving_average=0.9, fused=False)
BEGAN = 5
INTERRUPTED = (boards.__file__, dense.__file__, dense_part.__file__, redo.__file__)


@pytest.fixture(autouse=True)
def small_parts(cut_parts: CutParts) -> None:
    """Cut the trained elements in four; a part takes two blocks."""
    cut_parts(1024, 600)


def layout() -> ShardLayout:
    return place(VARIABLES, 1, partition_nbytes=0)[0]


def gradient(step: int, member: int) -> Flat:
    return np.random.default_rng((step, member)).standard_normal(layout().size, np.float32)


def begin(path: Path | None = None, update: Update = UPDATE) -> Shard:
    """Make a shard at version ``BEGAN``."""
    memory = segment_layout(layout(), update)
    segment = Segment.private(memory) if path is None else Segment.create(memory, path)
    shard = Shard(layout(), update, segment, safe=True, batch_size=10)
    shard.initialize(np.ones(layout().size, np.float32), version=BEGAN)
    return shard


EVEN = (10.0,) * 6
UNEVEN = (3.0, 10.0, EMPTY, 0.1, 7.0, 250.0)


def expected(
    members: int, steps: int, update: Update = UPDATE, weights: Sequence[float] = EVEN
) -> tuple[bytes, ...]:
    """Return what a ps makes of these gradients."""
    shard = begin(update=update)
    for step in range(steps):
        for member in range(members):
            shard.segment.gradient(member)[:] = gradient(step, member)
            shard.stage(member, member, weight=weights[member])
        shard.carry_out(Reduce(tuple(range(members))))
    return contents(shard)


def contents(shard: Shard) -> tuple[bytes, ...]:
    return tuple(array.tobytes() for array in (shard.parameters, *shard.slots.values()))


def opened(shard: Shard, members: int, steps: int = 100) -> Board:
    board = Board(shard.segment)
    board.open(BEGAN, steps, 40, [Holder(member, 7, member) for member in range(members)])
    return board


def seat(shard: Shard, member: int) -> Seat:
    """Return a seat as a process of its own has it."""
    own = Shard(shard.layout, shard.update, shard.segment, safe=True, batch_size=10)
    found = Board(shard.segment).seat_of(member, 7, own)
    assert found is not None
    return found


def make_ready(shard: Shard, member: Seat, weight: float = 10.0) -> bool:
    shard.segment.gradient(member.place)[:] = gradient(member.steps, member.place)
    return member.offer(10, 0.5, weight=weight)


@given(sizes=st.lists(st.integers(0, 10), min_size=1, max_size=12), members=st.integers(1, 17))
def test_every_part_has_one_owner_and_nobody_much_more_than_a_share(
    sizes: list[int], members: int
) -> None:
    found = owned(sizes, members)
    assert len(found) == members
    assert [part for own in found for part in own] == list(range(len(sizes)))
    for own in found:
        assert sum(sizes[part] for part in own) <= sum(sizes) / members + max(sizes)


@pytest.mark.parametrize(
    ("values", "target", "late"),
    [
        ((4, 6, 8), 4, -1),
        ((4, 6, 8), 6, 0),
        ((6, 4, 4), 6, 1),
        ((4, 5, 8), 6, 1),  # taken goes first
        ((4, 5, 8), 4, -1),
        ((5, 4, 5), 6, 2),
        ((-1,), 0, 0),
    ],
)
def test_word_that_is_behind_is_found(values: tuple[int, ...], target: int, late: int) -> None:
    memory = np.zeros((len(values), 3), np.int64)
    memory[:, 1] = values
    assert words.behind(memory[0, 1:].ctypes.data, len(values), 3, target) == late


def test_word_is_changed_only_by_who_knows_its_value() -> None:
    memory = np.array([3], np.int64)
    assert not words.swap(memory.ctypes.data, 2, 9)
    assert words.swap(memory.ctypes.data, 3, 1 << 40 | 9)
    assert memory[0] == 1 << 40 | 9


@pytest.mark.parametrize("weights", [EVEN, UNEVEN])
@pytest.mark.parametrize("members", [1, 2, 3, 6])
def test_steps_on_the_board_give_the_bits_of_a_ps(members: int, weights: Sequence[float]) -> None:
    shard = begin()
    board = opened(shard, members)
    seats = [seat(shard, member) for member in range(members)]
    batches = []
    for step in range(4):
        for each in seats:
            assert make_ready(shard, each, weights[each.place])
            assert (each.missing(MADE) < 0) == (each.place == members - 1)
        for each in reversed(seats):
            each.update()
            assert (each.missing(DONE) < 0) == (each.place == 0)
        batches += [each.end_step() for each in seats]
        assert board.made == board.sealed == step + 1
        assert not board.is_over
        assert shard.segment.words[CLOCK] % 2 == 1
    assert batches == list(range(40, 40 + 4 * members))
    whole = 4 * weights[0]
    assert board.figures(0, 4) == (40, whole / 2, 0.5, whole, weights[0], {})
    assert board.figures(0, 3).examples == 30
    board.take(0)
    assert board.is_over
    board.close()
    assert shard.version == BEGAN + 4
    assert contents(shard) == expected(members, 4, weights=weights)
    assert shard.segment.words[CLOCK] % 2 == 0


def test_gradient_that_was_ready_when_its_seat_was_taken_counts() -> None:
    shard = begin()
    board = opened(shard, 2)
    first, second = seat(shard, 0), seat(shard, 1)
    assert make_ready(shard, first)
    board.take(0)
    assert not board.is_over
    assert make_ready(shard, second)
    assert second.missing(MADE) == -1
    assert not board.is_over
    second.update()
    assert board.lacks(0)
    board.finish(0, shard, is_dead=True)
    assert board.is_over
    assert contents(shard) == expected(2, 1)


def test_member_that_is_ready_and_then_taken_is_not_over_for_one_that_looked_before() -> None:
    shard = begin()
    board = opened(shard, 2)
    first, second = seat(shard, 0), seat(shard, 1)
    assert make_ready(shard, first)
    late = first.missing(MADE)
    assert make_ready(shard, second)
    board.take(late)
    assert not first.is_over(late)
    assert first.missing(MADE) == -1


def test_late_member_of_an_older_roster_changes_nothing() -> None:
    shard = begin()
    board = opened(shard, 2)
    late = seat(shard, 0)
    board.take(0)
    board.close()
    opened(shard, 2)
    before = shard.segment.board.tolist()
    assert not make_ready(shard, late)
    assert shard.segment.board.tolist() == before
    assert board.made == 0
    assert seat(shard, 0).missing(MADE) == 0
    assert Board(shard.segment).seat_of(0, 6, shard) is None


def test_member_uses_the_learning_rate_that_the_ps_was_given() -> None:
    shard = begin(update=Update(SGD(0.1), fused=False))
    opened(shard, 1)
    own = Shard(shard.layout, shard.update, shard.segment, safe=True, batch_size=10)
    shard.learning_rate = 0.0
    only = Board(shard.segment).seat_of(0, 7, own)
    assert only is not None
    assert make_ready(shard, only)
    only.update()
    assert (shard.parameters[: layout().trained] == 1).all()


def test_slice_whose_finisher_is_killed_too_is_finished_by_the_next(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    after, line = expected(2, 1), 0
    while True:
        shard = begin(tmp_path / "board")
        board = opened(shard, 2)
        dying, survivor = seat(shard, 0), seat(shard, 1)
        make_ready(shard, dying)
        make_ready(shard, survivor)
        assert dying_at(60, dying.update, INTERRUPTED)
        survivor.update()
        board.take(0)
        died = dying_at(line, lambda: board.finish(0, shard, is_dead=True), INTERRUPTED)  # noqa: B023
        if died and board.lacks(0):
            board.finish(0, shard, is_dead=True)
        assert board.is_over
        assert contents(shard) == after
        shard.segment.remove()
        if not died:
            return
        line += 7


def test_roster_that_begins_while_a_member_looks_gives_it_no_seat_of_both() -> None:
    shard = begin()
    board = opened(shard, 2)

    class Slow(Board):
        @property
        def roster(self) -> Terms:
            found = super().roster
            board.close()
            opened(shard, 3)
            return found

    assert Slow(shard.segment).seat_of(0, 7, shard) is None
    assert Board(shard.segment).seat_of(0, 7, shard) is not None


def test_figures_are_of_the_steps_that_are_asked_for_and_of_what_all_of_them_measured() -> None:
    shard = begin()
    board, member = opened(shard, 1), seat(shard, 0)
    for step, sums in enumerate(({"right": 4.0, "größe[0]": 1.0}, {"größe[0]": 0.5}, {}), 1):
        assert member.offer(10, step / 2, sums)
        member.update()
        member.end_step()
        before = board.figures(0, step - 1)
        assert before.sums == ({}, {"right": 4.0, "größe[0]": 1.0}, {"größe[0]": 1.5})[step - 1]
    assert board.figures(0, 3) == Figures(30, 30.0, 1.5, 30.0, 10.0, {})
