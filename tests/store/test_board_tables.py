"""Tables on a board: each member changes some of them, killed anywhere, against a ps's updates."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kills import dying_at
from tests.store import with_tables
from tests.store.conftest import CutParts
from tests.store.with_tables import WHOLE, Job, close, remove, rows, table
from zmqtrain.models.tables import RowsOf
from zmqtrain.optim import Adam, Ftrl, RowwiseAdagrad, Update, redo
from zmqtrain.protocol.orders import Apply, Reduce
from zmqtrain.protocol.status import TableStatus
from zmqtrain.store import board as boards
from zmqtrain.store import board_share, row_store
from zmqtrain.store.board import DONE, MADE, Board, Holder, Seat
from zmqtrain.store.holdings import dense, dense_part, tables
from zmqtrain.store.holdings.tables import Tables
from zmqtrain.store.layout import Variable
from zmqtrain.store.placement import place
from zmqtrain.store.row_store import RowStore
from zmqtrain.store.shard import Shard
from zmqtrain.store.table_memory import reach

STRIDE = int(os.environ.get("STRIDE", "149"))
OF_STEPS = boards, board_share, tables, row_store, dense, dense_part, redo
INTERRUPTED = [module.__file__ for module in OF_STEPS]

TABLES = [
    table("user", 0, 4),
    table("item", 1, 2, admit_after=1, forget_after=2, max_rows=10),
    table("word", 2, 8),
]
UPDATES = [
    Update(Adam(0.1, catch_up=True), fused=False),
    Update(RowwiseAdagrad(0.1)),
    Update(Ftrl(0.1, l1=0.01)),
]
(LAYOUT,) = place([Variable("w", (4005,))], 1, partition_nbytes=WHOLE)
JOB = Job(TABLES, UPDATES, Update(Adam(0.1), fused=False), LAYOUT)


@pytest.fixture(autouse=True)
def _small_blocks(cut_parts: CutParts) -> None:
    """Cut the dense parameters in four; a part takes two blocks."""
    cut_parts(1024, 600, table_block=24)


def gradient(step: int, member: int) -> list[RowsOf]:
    """Return rows of some tables: in each step, some member lacks one."""
    return [rows(of, 10 * step + member) for of in TABLES if (step + member + of.number) % 4]


def shard_of_a_ps(members: int, steps: int, job: Job = JOB) -> Shard:
    """Return the shard of a ps that got these gradients."""
    shard = job.begin()
    for step in range(steps):
        for member in range(members):
            with_tables.push(shard, member, gradient(step, member), 4 + member, step)
        shard.carry_out(Reduce(tuple(range(members))))
    return shard


def on_a_ps(members: int, steps: int, job: Job = JOB) -> tuple[Any, ...]:
    return job.contents(shard_of_a_ps(members, steps, job))


def status(shard: Shard) -> dict[str, TableStatus]:
    """Return what is counted of each table; the hottest rows are those that a ps looked at."""
    return {n: replace(each, hottest=()) for n, each in shard.table_status().items()}


def opened(shard: Shard, members: int) -> Board:
    board = Board(shard.segment)
    shard.keep_frozen()
    board.open(shard.version, 100, 0, [Holder(member, 7, member) for member in range(members)])
    return board


def seat(job: Job, shard: Shard, member: int) -> Seat:
    """Return a seat as a process of its own has it."""
    assert shard.tables is not None
    memory = reach(shard.tables.memory.name, job.layouts, writable=True)
    own = Tables(job.updates, memory)
    given = job.layout, job.update, shard.segment
    mine = Shard(*given, safe=True, batch_size=4, tables=own)
    found = Board(shard.segment).seat_of(member, 7, mine)
    assert found is not None
    return found


def make_ready(shard: Shard, member: Seat) -> None:
    number, step = member.place, member.steps
    assert shard.tables is not None
    shard.segment.gradient(number)[:] = step
    shard.tables.memory.buffer(number).write(gradient(step, number))
    assert member.offer(4, 0.5, weight=4 + number)


def make_steps(shard: Shard, seats: Sequence[Seat], steps: int) -> None:
    for _ in range(steps):
        for each in seats:
            make_ready(shard, each)
        for each in reversed(seats):
            each.update()
        for each in seats:
            assert each.missing(DONE) < 0
            each.end_step()


CLIPPED = Job(
    TABLES,
    [Update(each.rule, clip_norm=0.5, fused=False) for each in UPDATES],
    Update(Adam(0.1), clip_norm=0.5, fused=False),
    LAYOUT,
)


@pytest.mark.parametrize("job", [JOB, CLIPPED], ids=["", "clipped"])
@pytest.mark.parametrize("members", [1, 2, 3, 10])
def test_steps_on_the_board_give_the_bits_of_a_ps(members: int, job: Job) -> None:
    shard = job.begin()
    board = opened(shard, members)
    make_steps(shard, [seat(job, shard, member) for member in range(members)], 5)
    board.take(0)
    assert board.is_over
    board.close()
    expected = shard_of_a_ps(members, 5, job)
    assert job.contents(shard) == job.contents(expected)
    assert status(shard) == status(expected)
    assert all(each.updated for each in status(shard).values())


def test_kept_rows_are_those_before_the_roster_though_others_train_and_forget(
    tmp_path: Path,
) -> None:
    tmp_path.chmod(0o700)
    shard = JOB.begin(tmp_path / "shard")
    for step in range(3):
        with_tables.push(shard, 0, gradient(step, 0), 4, step)
        shard.carry_out(Apply(0))
    kept = shard.keep(average=False).rows
    assert kept is not None
    assert shard.tables is not None
    every = np.arange(60)
    expected = [shard.tables.rows(each.number, every) for each in TABLES]
    opened(shard, 2)
    seats = [seat(JOB, shard, member) for member in range(2)]
    for _ in range(4):
        make_steps(shard, seats, 1)
        for each in TABLES:
            np.testing.assert_array_equal(kept.read(each.number, every), expected[each.number])
    remove(shard)


def test_tables_have_other_owners_in_the_next_roster_and_go_on() -> None:
    shard = JOB.begin()
    for members, steps in ((3, 2), (1, 3), (2, 2)):
        board = opened(shard, members)
        make_steps(shard, [seat(JOB, shard, member) for member in range(members)], steps)
        board.take(0)
        board.close()
    with_tables.push(shard, 0, gradient(9, 0), seed=9)
    shard.carry_out(Reduce((0,)))
    expected = JOB.begin()
    for members, steps in ((3, 2), (1, 3), (2, 2)):
        for step in range(steps):
            for member in range(members):
                with_tables.push(expected, member, gradient(step, member), 4 + member, step)
            expected.carry_out(Reduce(tuple(range(members))))
    with_tables.push(expected, 0, gradient(9, 0), seed=9)
    expected.carry_out(Reduce((0,)))
    assert JOB.contents(shard) == JOB.contents(expected)


@pytest.mark.parametrize("restarted", [False, True], ids=["ps lives", "ps is killed, too"])
@pytest.mark.parametrize("dead", [0, 1])
def test_step_of_a_member_killed_at_any_line_is_made_or_never_was(
    dead: int, restarted: bool, tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    found = {}
    expected = {made: on_a_ps(2, 2 + made) for made in (False, True)}
    for line in count(random.randrange(STRIDE), STRIDE):
        shard = JOB.begin(tmp_path / "ps")
        board = opened(shard, 2)
        seats = [seat(JOB, shard, member) for member in range(2)]
        make_steps(shard, seats, 2)
        dying, survivor = seats[dead], seats[1 - dead]
        make_ready(shard, survivor)

        def step(dying: Seat = dying, shard: Shard = shard) -> None:
            make_ready(shard, dying)
            dying.update()
            dying.end_step()

        died = dying_at(line, step, INTERRUPTED)
        if restarted:
            close(shard)
            shard = JOB.adopt(tmp_path / "ps")
            board = Board(shard.segment)
        board.take(dead)
        is_made = survivor.missing(MADE) < 0
        if is_made:
            survivor.update()
        if board.lacks(dead):
            assert board.finish(dead, shard, is_dead=True)
        assert board.is_over
        board.close()
        assert JOB.contents(shard) == expected[is_made], f"line {line}"
        found[is_made] = found.get(is_made, 0) + 1
        remove(shard)
        if not died:
            break
    assert found[True] > 1


def test_restarted_ps_leaves_tables_alone_that_members_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    shard = JOB.begin(tmp_path / "ps")
    board = opened(shard, 1)
    make_steps(shard, [only := seat(JOB, shard, 0)], 2)
    close(shard)
    repaired: list[RowStore] = []
    monkeypatch.setattr(RowStore, "repair", lambda store: repaired.append(store))
    again = JOB.adopt(tmp_path / "ps")
    assert not repaired
    make_steps(again, [only], 1)
    board = Board(again.segment)
    board.take(0)
    board.close()
    assert JOB.contents(again) == on_a_ps(1, 3)
    close(again)
    remove(JOB.adopt(tmp_path / "ps"))
    assert repaired


def test_member_without_room_for_new_rows_does_not_make_its_gradient_ready() -> None:
    shard = JOB.begin()
    opened(shard, 2)
    only = seat(JOB, shard, 0)
    assert not only.has_room(gradient(0, 0))
    assert only.has_room(())
    with_tables.push(shard, 0, gradient(0, 1))
    shard.carry_out(Reduce((0,)))
    many = rows(TABLES[0], 1, range(5000))
    assert only.has_room(gradient(0, 1))
    assert not only.has_room([many])
