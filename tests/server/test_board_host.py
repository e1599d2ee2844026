"""The ps's part in a roster that a member leaves: dead, asleep, or in the middle of its slice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from tests.coordination.parts import make_host
from tests.kills import Killed
from tests.limits import within
from tests.server.conftest import add_worker, make_state
from tests.store import with_tables
from zmqtrain.actors.waits import Waits
from zmqtrain.config.cluster import Role, Task
from zmqtrain.coordination.events import Stepped
from zmqtrain.errors import PeerLostError
from zmqtrain.optim import SGD, Update
from zmqtrain.protocol.orders import Apply, Roster
from zmqtrain.server.board_host import BoardHost
from zmqtrain.server.executor import Executor
from zmqtrain.server.state import ShardState
from zmqtrain.store import checkpoint
from zmqtrain.store.board import Board, Seat
from zmqtrain.store.holdings.dense import Dense
from zmqtrain.store.holdings.tables import Tables
from zmqtrain.store.segment import Reached, reach
from zmqtrain.store.shard import Shard
from zmqtrain.store.table_memory import reach as reach_tables


class Interrupted(Dense):
    """A shard's block as a member sees it, who is interrupted in the middle of its update."""

    happens: Callable[[], None] = staticmethod(lambda: None)

    def update_parts(self, numbers: Iterable[int], *gradients: Any) -> None:
        self.happens()
        super().update_parts(numbers, *gradients)


class Job:
    """Members 0 and 1, who have their gradients of -1 ready; 1 owns the only part of the shard."""

    def __init__(self, patience_s: float = 60.0) -> None:
        self.state = make_state(safe=True)
        self.segment = self.state.shard.segment
        self.waits = Waits("ps 0")
        self.told: list[Stepped] = []
        self.host = BoardHost(self.state, self.waits, patience_s)
        self.reached: dict[int, Reached] = {}
        for index in (0, 1):
            add_worker(self.state, index, buffer=index, lane="memory")
            self.reached[index] = reach(self.segment.name, self.segment.layout)
            self.reached[index].gradient(index)[:] = -1
        self.host.begin(Roster((0, 1), steps=9, next_batch=0))
        self.blocks: list[Interrupted] = []
        self.other, self.owner = map(self._seat, (0, 1))
        assert self.other.offer(1, 0.5) and self.owner.offer(1, 0.5)

    def leave(self) -> None:
        """The owner of the slice is not a member any more."""
        del self.state.workers[1]
        self.take(self.host.halt(1))

    def take(self, stepped: Stepped | None) -> None:
        """Do as the leader does with what the roster has made."""
        if stepped is not None:
            self.told.append(stepped)
            if stepped.over:
                self.host.close()

    async def watch(self) -> None:
        async for stepped in self.host.watch():
            self.take(stepped)

    @property
    def is_made(self) -> bool:
        return (
            self.told == [Stepped(1, 2, 1.0, over=True, losses={0: 0.5, 1: 0.5}, weight=2)]
            and self.state.version == 1
        )

    def _seat(self, index: int) -> Seat:
        of = self.state.shard
        shard = Shard(of.layout, of.update, self.segment, safe=True)
        shard.dense = Interrupted(
            of.layout, of.update, self.segment, safe=True, threads=1, device=None
        )
        self.blocks.append(shard.dense)
        seat = Board(self.segment).seat_of(index, 1, shard)
        assert seat is not None
        return seat


def killed() -> None:
    raise Killed


async def test_slice_of_a_member_that_sleeps_is_updated_by_the_ps_alone() -> None:
    roster = Job()
    roster.other.update()
    roster.leave()
    assert roster.is_made
    roster.owner.update()  # it wakes up
    assert (roster.state.shard.parameters == 1).all()


@pytest.mark.parametrize("where", ["before its update", "in its update"])
async def test_slice_of_a_member_that_died_is_updated_by_the_ps(where: str) -> None:
    roster = Job()
    roster.other.update()
    if where == "in its update":
        roster.blocks[1].happens = killed
        with pytest.raises(Killed):
            roster.owner.update()
    del roster.reached[1]
    roster.leave()
    assert roster.is_made
    assert (roster.state.shard.parameters == 1).all()


async def test_steps_that_the_shard_does_not_know_of_are_those_of_the_roster_in_force() -> None:
    roster = Job()
    assert roster.host.made == 0
    roster.owner.update()
    roster.other.update()
    roster.take(roster.host.report())
    assert (roster.host.made, roster.state.version) == (1, 0)
    roster.take(roster.host.halt())
    assert (roster.host.made, roster.state.version) == (0, 1)


async def test_member_that_lives_in_the_middle_of_its_slice_is_waited_for() -> None:
    roster = Job()
    roster.other.update()
    waits = []

    def left() -> None:
        roster.leave()
        waits.extend(roster.waits.snapshot())

    roster.blocks[1].happens = left
    roster.owner.update()
    assert [(wait.owner, wait.peer) for wait in waits] == [("ps 0", "worker 1")]
    assert waits[0].until_s is not None and waits[0].until_s <= 60
    roster.take(roster.host.report())
    assert roster.is_made and not roster.waits.snapshot()
    assert (roster.state.shard.parameters == 1).all()


async def test_member_that_stops_in_the_middle_of_its_slice_ends_the_job_in_time() -> None:
    roster = Job(patience_s=0.01)
    roster.blocks[1].happens = killed
    with pytest.raises(Killed):
        roster.owner.update()  # but its process holds its gradient still
    roster.leave()
    with pytest.raises(PeerLostError, match="worker 1"):
        await asyncio.wait_for(roster.watch(), 60)
    assert not roster.is_made


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


async def test_checkpoint_that_is_being_written_lacks_the_steps_of_the_next_roster(
    directory: Path,
) -> None:
    """Members change rows from other processes, which know of no checkpoint."""
    job = with_tables.Job([of := with_tables.table("t")], [Update(SGD(1.0))])
    shard = job.begin(directory / "ps")
    with_tables.push(shard, 0, [with_tables.rows(of, 1)])
    shard.carry_out(Apply(0))
    expected = with_tables.tensors_of(shard)
    copied = shard.write(checkpoint.begin(directory, 1))
    state = ShardState(Task(Role.PS, 0), shard)
    add_worker(state, 0, buffer=0, lane="memory")
    host, begun = BoardHost(state, Waits("ps 0"), 60.0), asyncio.Event()

    def begin(roster: Any) -> None:
        host.begin(roster)
        begun.set()

    executor = Executor(make_host(), state, begin)
    executor.carry_out([(1, Roster((0,), steps=9, next_batch=0))])
    assert not begun.is_set()  # rows are copied beside the event loop
    await within(begun.wait())
    executor.close()
    assert shard.tables is not None
    memory = reach_tables(shard.tables.memory.name, job.layouts, writable=True)
    tables = Tables(job.updates, memory)
    member = Shard(shard.layout, job.update, shard.segment, safe=True, tables=tables)
    seat = Board(shard.segment).seat_of(0, 1, member)
    assert seat is not None
    assert seat.offer(4, 0.5)
    seat.update()
    checkpoint.seal_shard(copied, 0, 1)
    found = load_file(copied.path)
    assert shard.tables.rows(0, expected["/ids/t"]).tobytes() != expected["/rows/t"].tobytes()
    assert {name: found[name].tobytes() for name in expected} == {
        name: array.tobytes() for name, array in expected.items()
    }
    with_tables.remove(shard)
