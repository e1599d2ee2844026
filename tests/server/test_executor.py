"""What comes of orders: changes of the shard, answers to workers, reports."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.asking import Asked
from tests.server.conftest import SIZE, add_push, add_worker, make_state
from zmqtrain.coordination.membership import PeerTable
from zmqtrain.observe.metrics import Metrics
from zmqtrain.optim import SGD
from zmqtrain.server.executor import Applied, Executor, ReleasedUndecided, UpdateRefused
from zmqtrain.server.state import PendingPull, ShardState
from zmqtrain.wire.messages import Order, Release

Make = Callable[..., Executor]


class NoRate:
    """A schedule that gives no learning rate."""

    def __call__(self, step: int) -> float:
        return float("nan")

    def __repr__(self) -> str:
        return "NoRate()"


class Ears:
    """Keeps reports and errors."""

    def __init__(self) -> None:
        self.reports: list[Any] = []
        self.errors: list[Exception] = []


@pytest.fixture
def state() -> ShardState:
    return make_state()


@pytest.fixture
def ears() -> Ears:
    return Ears()


@pytest.fixture
def executor(state: ShardState, peers: PeerTable, ears: Ears) -> Iterator[Executor]:
    made = Executor(
        state,
        peers,
        Metrics("ps"),
        report=ears.reports.append,
        spawn=lambda coroutine: True,
        crash=ears.errors.append,
    )
    made._work.last_s = 0.0  # updates are known to be short
    yield made
    made.close()


def release(sequence: int, *, stop: bool = False) -> Order:
    return Order("release", (0,), "", 1, sequence, (5,), stop)


async def test_push_is_applied_and_answered_with_the_next_lease(
    state: ShardState, peers: PeerTable, executor: Executor, ears: Ears
) -> None:
    peer, request = add_worker(peers), Asked()
    pending = add_push(state, 7, request)
    executor.carry_out([(1, Order("apply", (0,))), (2, release(7))])
    assert np.array_equal(state.shard.parameters, np.full(SIZE, -1, np.float32))
    answer, (tensor,) = request.replies[0]
    assert (answer.sequence, answer.result, answer.version) == (7, "applied", 1)
    assert answer.batches == (5,)
    assert tensor.nbytes == 4 * SIZE
    assert (state.pending, state.orders, peer.answered) == ({}, 2, 7)
    executor.count()
    assert [type(report) for report in ears.reports] == [Applied]
    assert ears.reports[0].contributions == [pending]


async def test_release_of_a_push_that_has_not_come_is_noted(
    state: ShardState, peers: PeerTable, executor: Executor, ears: Ears
) -> None:
    peer = add_worker(peers)
    executor.carry_out([(1, release(7))])
    assert (peer.released, state.orders, ears.reports) == (7, 1, [])


async def test_release_of_a_push_that_was_decided_before_it_came_is_reported(
    state: ShardState, peers: PeerTable, executor: Executor, ears: Ears
) -> None:
    add_worker(peers)
    pending = add_push(state, 7)
    executor.carry_out([(1, release(7))])
    assert ears.reports == [ReleasedUndecided(0, pending)]
    assert state.pending == {0: pending}


@pytest.mark.parametrize(("incarnation", "sequence"), [(2, 0), (1, 3)])
async def test_release_of_another_life_or_request_changes_nothing(
    state: ShardState, peers: PeerTable, executor: Executor, incarnation: int, sequence: int
) -> None:
    peer = add_worker(peers)
    state.pending[0] = pending = PendingPull(1, None)
    executor.carry_out([(1, Order("release", (0,), "", incarnation, sequence))])
    assert (state.pending, peer.released, state.orders) == ({0: pending}, -1, 1)


@pytest.mark.parametrize("state", [make_state(rule=SGD(NoRate()))], ids=["no rate"])
async def test_update_that_the_rule_refuses_drops_its_push(
    state: ShardState, peers: PeerTable, executor: Executor, ears: Ears
) -> None:
    add_worker(peers)
    pending = add_push(state, 1)
    executor.carry_out([(1, Order("apply", (0,)))])
    assert pending.result == "dropped"
    assert [type(report) for report in ears.reports] == [UpdateRefused]
    assert (state.version, state.orders) == (0, 1)


async def test_worker_that_is_told_to_stop_is_sent_no_parameters(
    state: ShardState, peers: PeerTable, executor: Executor
) -> None:
    """They would keep the end of the run back on a slow link."""
    peer, request = add_worker(peers), Asked()
    stop = Release(1, "applied", 1, stop=True)
    executor.send_release(request, peer, stop)
    assert request.replies == [stop]


async def test_update_that_cannot_be_counted_is_a_bug(
    state: ShardState, peers: PeerTable, executor: Executor, ears: Ears
) -> None:
    bug = ValueError("a bug")

    def fail(report: Any) -> None:
        raise bug

    executor._report = fail
    add_worker(peers)
    add_push(state, 1)
    executor.carry_out([(1, Order("apply", (0,)))])
    await asyncio.sleep(0)
    assert ears.errors == [bug]
