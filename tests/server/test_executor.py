"""Effects of orders: changes of the shard, answers to workers, reports."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.asking import Asked
from tests.coordination.parts import make_host
from tests.limits import within
from tests.server.conftest import SIZE, add_push, add_worker, make_state
from zmqtrain.compute.arrays import Flat
from zmqtrain.config.cluster import Role, Task
from zmqtrain.coordination.peers import PeerTable
from zmqtrain.errors import CheckpointError, SegmentError
from zmqtrain.optim import AVERAGE, SGD, Slot, Update
from zmqtrain.protocol.orders import Answer, Apply, Order, Rate, Reduce, Snapshot, Switch
from zmqtrain.server.executor import Applied, Early, Executor, OrderOutcome, Refused
from zmqtrain.server.state import Pending, ShardState, recover
from zmqtrain.store import checkpoint
from zmqtrain.store.layout import Variable
from zmqtrain.store.placement import place
from zmqtrain.store.segment import Segment
from zmqtrain.store.segment_layout import ORDERS, REDO_SIZE
from zmqtrain.store.shard import Shard, segment_layout
from zmqtrain.wire.control import Keep, ShardWritten
from zmqtrain.wire.messages import Pull, PullReply, Push, PushReply


class NoRate:
    """A schedule that gives no learning rate."""

    def __call__(self, step: int) -> float:
        return float("nan")

    def __repr__(self) -> str:
        return "NoRate()"


class Ears:
    """Keeps what comes of orders, and errors."""

    def __init__(self) -> None:
        self.reports: list[OrderOutcome] = []
        self.errors: list[Exception] = []
        self.copied = asyncio.Event()  # a shard, which is not made durable here
        self.failed = asyncio.Event()

    def crash(self, error: Exception) -> None:
        self.errors.append(error)
        self.failed.set()

    def spawn(self, seal: Coroutine[Any, Any, None]) -> bool:
        seal.close()
        self.copied.set()
        return True


@pytest.fixture
def state() -> ShardState:
    return make_state(safe=True)


@pytest.fixture
def ears() -> Ears:
    return Ears()


@pytest.fixture
def executor(state: ShardState, ears: Ears) -> Iterator[Executor]:
    made = make_executor(state, ears)
    made.work.last_s = 0.0  # updates are known to be short
    yield made
    made.close()


def make_executor(state: ShardState, ears: Ears) -> Executor:
    host = make_host(spawn=ears.spawn, crash=ears.crash)
    return Executor(host, state, ears.reports.append)


def answer(sequence: int) -> Answer:
    return Answer(0, 1, sequence, (5,))


async def test_push_is_applied_and_answered_with_the_next_lease(
    state: ShardState, executor: Executor, ears: Ears
) -> None:
    worker, request = add_worker(state), Asked(Push(7, 0, 0, 1, 0.5))
    add_push(state, 7, request)
    executor.carry_out([(1, Apply(0)), (2, answer(7))])
    assert np.array_equal(state.shard.parameters, np.full(SIZE, -1, np.float32))
    reply, (tensor,) = request.replies[0]
    assert (reply.sequence, reply.result, reply.version) == (7, "applied", 1)
    assert reply.batches == (5,)
    assert tensor.nbytes == 4 * SIZE
    assert (state.pending(), state.orders, worker.answered) == ([], 2, 7)
    executor.count()
    (report,) = ears.reports
    assert isinstance(report, Applied)
    assert (report.version, report.staleness) == (1, {0: 0})


async def test_round_is_as_many_steps_as_its_order_says(
    state: ShardState, executor: Executor, ears: Ears
) -> None:
    state.shard.learning_rate = 0.25
    _, request = add_worker(state), Asked(Push(1, 0, 0, 5, 0.5, batches=5))
    add_push(state, 1, request)
    following = replace(answer(1), local_steps=3)
    executor.carry_out([(1, Reduce((0,), local_steps=5)), (2, following)])
    assert np.array_equal(state.shard.parameters, state.shard.segment.gradient(0))
    reply, _ = request.replies[0]
    assert (reply.version, reply.local_steps, reply.learning_rate) == (5, 3, 0.25)
    executor.count()
    (report,) = ears.reports
    assert isinstance(report, Applied) and report.staleness == {0: 0}


@pytest.mark.parametrize("long_work", [False, True])
async def test_update_that_fails_half_way_is_finished_by_the_next_life_and_no_order_is_lost(
    tmp_path: Path, ears: Ears, long_work: bool
) -> None:
    shard = make_halting_shard(tmp_path / "segment", blocks=2)
    state = ShardState(Task(Role.PS, 0), shard)
    executor = make_executor(state, ears)
    executor.work.last_s = float("inf") if long_work else 0.0
    orders = [*enumerate([Reduce((0,)), Answer(0, 1, 1), Reduce((1,)), Rate(0.5)], start=1)]
    executor.carry_out(orders)
    await within(ears.failed.wait())
    executor.close()
    assert [type(error) for error in ears.errors] == [MemoryError]
    assert (state.version, state.orders) == (0, 0)
    with pytest.raises(SegmentError, match="update 0 of this shard failed half-way"):
        shard.carry_out(Reduce((1,)), 3)

    shard.segment.close()
    layout = segment_layout(shard.layout, shard.update)
    left = Segment.adopt(layout, tmp_path / "segment")
    assert left is not None
    again = Shard(shard.layout, Update(SGD(1.0), fused=False), left, safe=True)
    again.repair()
    assert (again.version, left.words[ORDERS]) == (1, 1)
    stage_two(again)
    again.carry_out(Reduce((1,)), 3)
    assert np.array_equal(again.parameters, np.full(again.layout.size, -3, np.float32))
    left.remove()


@dataclass(frozen=True)
class Halting:
    """SGD in whose first update no memory is left after some blocks."""

    left: list[int]
    error: Exception = field(default_factory=MemoryError)
    slots: tuple[Slot, ...] = ()

    def update(self, parameters: Flat, gradient: Flat, slots: Any, step: int) -> None:
        if not self.left[0]:
            raise self.error
        self.left[0] -= 1
        SGD(1.0).update(parameters, gradient, slots, step)


def make_halting_shard(path: Path, blocks: int, error: Exception | None = None) -> Shard:
    """Return a shard with the gradients of two workers, the second twice the first."""
    update = Update(Halting([blocks - 1], error or MemoryError()), fused=False)
    (layout,) = place([Variable("w", (blocks * REDO_SIZE + 7,))], 1)
    segment = Segment.create(segment_layout(layout, update), path)
    shard = Shard(layout, update, segment, safe=True)
    shard.initialize(np.zeros(layout.size, np.float32))
    stage_two(shard)
    return shard


def stage_two(shard: Shard) -> None:
    for worker in (0, 1):
        shard.segment.gradient(worker)[:] = worker + 1
        shard.stage(worker, worker, 1)


async def test_answer_is_kept_before_it_is_sent(state: ShardState, executor: Executor) -> None:
    answered: list[int] = []

    class Asking(Asked):
        def reply(self, message: Any, tensors: Any = ()) -> None:
            again = ShardState(state.task, state.shard)
            recover(again, PeerTable(5.0, 2, lambda peer: False))
            answered.append(again.workers[0].answered)

    add_worker(state, buffer=0)
    add_push(state, 7, Asking())
    executor.carry_out([(1, Apply(0)), (2, answer(7))])
    assert answered == [7]


async def test_release_of_a_push_that_has_not_come_is_noted(
    state: ShardState, executor: Executor, ears: Ears
) -> None:
    worker = add_worker(state)
    executor.carry_out([(1, answer(7))])
    assert (worker.is_released, worker.early, state.orders) == (False, answer(7), 1)
    assert ears.reports == []
    add_push(state, 7)
    assert worker.is_released


async def test_release_of_a_push_that_was_decided_before_it_came_is_reported(
    state: ShardState, executor: Executor, ears: Ears
) -> None:
    worker = add_worker(state)
    pending = add_push(state, 7)
    executor.carry_out([(1, answer(7))])
    assert ears.reports == [Early(worker)]
    assert state.pending() == [(worker, pending)]


async def test_pull_is_answered_by_an_admission_with_the_first_leases(
    state: ShardState, executor: Executor
) -> None:
    worker, request = add_worker(state, lane="shm"), Asked()
    worker.pending = Pending(Pull(), request)
    executor.carry_out([(1, Answer(0, 1, batches=(3, 4)))])
    assert request.replies == [PullReply(0, (3, 4))]
    assert (state.pending(), worker.received, worker.answered) == ([], 0, 0)


@pytest.mark.parametrize(
    "order",
    [Answer(0, 2), Answer(1, 1), Answer(0, 1, 3)],
    ids=["of another life", "of another worker", "after push 3"],
)
async def test_pull_is_not_answered_by_another_order(
    state: ShardState, executor: Executor, order: Order
) -> None:
    worker = add_worker(state)
    pending = worker.pending = Pending(Pull(), None)
    executor.carry_out([(1, order)])
    assert (state.pending(), worker.early, state.orders) == ([(worker, pending)], None, 1)


@pytest.mark.parametrize("state", [make_state(rule=SGD(NoRate()))], ids=["no rate"])
async def test_update_that_the_rule_refuses_drops_its_push(
    state: ShardState, executor: Executor, ears: Ears
) -> None:
    add_worker(state)
    pending = add_push(state, 1)
    executor.carry_out([(1, Apply(0))])
    assert pending.result == "dropped"
    assert [type(report) for report in ears.reports] == [Refused]
    assert (state.version, state.orders) == (0, 1)


async def test_worker_that_is_told_to_stop_is_sent_no_parameters(
    state: ShardState, executor: Executor
) -> None:
    """They would keep the end of the run back on a slow link."""
    request = Asked(Push(1, 0, 0, 1, 0.5))
    stop = PushReply(1, "applied", 1, stop=True)
    executor.send_parameters(request, stop)
    assert request.replies == [stop]


async def test_worker_that_reads_its_slices_elsewhere_is_sent_none(
    state: ShardState, executor: Executor
) -> None:
    request = Asked(Push(1, 0, 0, 1, 0.5, wants_parameters=False))
    executor.send_parameters(request, PushReply(1, "applied", 1))
    assert request.replies == [PushReply(1, "applied", 1)]


async def test_ps_that_leaves_carries_out_nothing_after_the_next_snapshot(
    executor: Executor, ears: Ears, state: ShardState, tmp_path: Path
) -> None:
    """So nothing is answered that the checkpoint does not hold."""
    add_worker(state)
    request = Asked()
    add_push(state, 1, request)
    executor.halt_at_snapshot()
    snapshot = Snapshot(str(checkpoint.begin(tmp_path, 0)))
    executor.carry_out([(1, Rate(0.5)), (2, snapshot)])
    executor.carry_out([(3, Apply(0)), (4, answer(1))])
    await within(ears.copied.wait())
    executor.carry_out([(5, Rate(0.25))])
    await asyncio.sleep(0)
    assert executor.halted
    assert (state.orders, state.version, state.shard.learning_rate) == (2, 0, 0.5)
    assert request.replies == []

    executor.halt_at_snapshot()  # no checkpoint came of that one
    assert (state.orders, state.version, state.shard.learning_rate) == (5, 1, 0.25)
    assert len(request.replies) == 1


async def test_snapshot_is_written_into_no_other_directory_than_that_of_an_attempt(
    executor: Executor, ears: Ears, tmp_path: Path
) -> None:
    done = asyncio.Event()
    executor.carry_out([(1, Snapshot(str(tmp_path)))])
    executor.after_orders(done.set)
    await within(done.wait())
    (report,) = ears.reports
    assert isinstance(report, ShardWritten)
    assert (report.directory, report.file) == (str(tmp_path), None)
    assert "is not a directory of a checkpoint" in report.reason


async def test_orders_that_came_while_a_new_generation_waited_are_not_carried_out(
    executor: Executor, state: ShardState, tmp_path: Path
) -> None:
    add_worker(state)
    request = Asked()
    add_push(state, 1, request)
    done = asyncio.Event()
    snapshot = Snapshot(str(tmp_path / "missing"))  # made beside the loop
    executor.carry_out([(1, snapshot)])
    executor.after_orders(executor.forget_orders)
    executor.carry_out([(2, Rate(0.5)), (3, Apply(0)), (4, answer(1))])
    executor.after_orders(done.set)
    await within(done.wait())
    assert (state.orders, state.version, state.shard.learning_rate) == (1, 0, None)
    assert request.replies == []


async def test_orders_of_a_generation_that_has_ended_are_not_carried_out(
    executor: Executor, state: ShardState
) -> None:
    add_worker(state)
    request = Asked()
    add_push(state, 1, request)
    executor.forget_orders(further=True)
    executor.carry_out([(1, Apply(0)), (2, answer(1))])
    assert (state.orders, state.version, request.replies) == (0, 0, [])
    executor.forget_orders()  # the next one begins
    executor.carry_out([(1, Apply(0)), (2, answer(1))])
    assert (state.orders, state.version, len(request.replies)) == (2, 1, 1)


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("copies", [1, 2])
async def test_version_that_is_asked_for_is_copied_before_the_next_update(
    ears: Ears, average: bool, copies: int
) -> None:
    state = make_state(moving_average=0.9, copies=copies)
    executor = make_executor(state, ears)
    add_worker(state)
    add_push(state, 1)
    executor.keep(Keep(2, average))
    executor.carry_out([(n, Apply(0)) for n in (1, 2, 3)])
    assert executor.kept(2) is None  # the first one is under way in the thread
    await within(come_to_rest(executor))
    executor.close()
    expected = make_state(moving_average=0.9)
    add_worker(expected)
    add_push(expected, 1)
    for _ in range(2):
        expected.shard.carry_out(Apply(0))
    segment = expected.shard.segment
    kept = executor.kept(2)
    assert kept is not None  # of what it owns
    values = segment.slots[AVERAGE] if average else segment.parameters
    assert np.array_equal(kept.parameters, values)
    assert (state.version, executor.kept(3)) == (3, None)


async def test_copy_is_kept_until_nobody_reads_it_or_another_one_is_made(
    state: ShardState, executor: Executor
) -> None:
    add_worker(state)
    add_push(state, 1)

    async def kept(*asked: Keep) -> list[int]:
        """Make an update after these requests; return what is kept after it."""
        for one in asked:
            executor.keep(one)
        executor.carry_out([(state.orders + 1, Apply(0))])
        await within(come_to_rest(executor))
        return [version for version in range(8) if executor.kept(version) is not None]

    assert await kept(Keep(1)) == [1]
    assert await kept(Keep(1), Keep(3)) == [1]  # the first question has come twice
    assert await kept() == [3]
    assert await kept(Keep(4, done=2)) == [4]  # another shard had passed 3
    assert await kept(Keep(0, done=3)) == [4]
    assert await kept(Keep(7), Keep(0, done=4)) == []
    assert await kept() == []
    executor.keep(Keep(9))
    executor.forget_kept()
    assert await kept(Keep(0)) == []


async def test_policy_that_begins_anew_with_a_pass_is_logged_once(
    executor: Executor, caplog: pytest.LogCaptureFixture
) -> None:
    specs = ["hogwild", "hogwild", "sync-replicas", "hogwild"]
    with caplog.at_level(logging.INFO):
        executor.carry_out([(n, Switch(spec)) for n, spec in enumerate(specs, 1)])
    logged = [record.args[0] for record in caplog.records if "policy" in record.msg]
    assert logged == ["hogwild", "sync-replicas", "hogwild"]


async def come_to_rest(executor: Executor) -> None:
    done = asyncio.Event()
    executor.after_orders(done.set)
    await done.wait()


@pytest.mark.parametrize("long_work", [False, True])
async def test_update_that_lacks_memory_half_way_ends_the_ps_and_is_not_saved(
    tmp_path: Path, ears: Ears, long_work: bool
) -> None:
    shard = make_halting_shard(tmp_path / "segment", blocks=2, error=SegmentError("no room"))
    executor = make_executor(ShardState(Task(Role.PS, 0), shard), ears)
    executor.work.last_s = float("inf") if long_work else 0.0
    executor.carry_out([*enumerate([Reduce((0,)), Answer(0, 1, 1)], start=1)])
    await within(ears.failed.wait())
    executor.close()
    assert [type(error) for error in ears.errors] == [SegmentError]
    assert not ears.reports
    with pytest.raises(CheckpointError, match="failed half-way"):
        shard.write(tmp_path)
