"""Decisions and reports of a shard that follows the leader."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.asking import Asked
from tests.coordination.parts import make_host
from tests.limits import within
from tests.server.conftest import add_push, add_worker, make_state
from zmqtrain.coordination.hand_over import OrderLog
from zmqtrain.errors import RefusedError
from zmqtrain.protocol.checkpoint import LastOrders, LedgerState, Saved
from zmqtrain.protocol.orders import Answer, Apply, Drop, Measure, Reduce, Switch
from zmqtrain.server.follower import Follower
from zmqtrain.server.state import Pending, ShardState
from zmqtrain.wire.messages import Arrived, Orders, Pull, ShardReport

SWITCH = Switch("hogwild")
Follow = Callable[..., Follower]


class FakeLink:
    """Keeps what the leader is told."""

    joined = False

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)


@pytest.fixture
def state() -> ShardState:
    return make_state(1)


@pytest.fixture
def link() -> FakeLink:
    return FakeLink()


@pytest.fixture
def follow(state: ShardState, link: FakeLink) -> Iterator[Follow]:
    executors = []

    def make(policy: str, order_log: OrderLog | None = None) -> Follower:
        to_leader: Any = link

        async def join() -> None:
            """The leader is there."""

        host = make_host(shards=2, policy=policy)
        follower = Follower(host, state, to_leader, join, order_log)
        follower.executor.work.last_s = 0.0  # updates are known to be short
        executors.append(follower.executor)
        follower.begin()
        return follower

    yield make
    for executor in executors:
        executor.close()


async def test_arrival_is_reported_under_a_coordinated_policy(
    state: ShardState, link: FakeLink, follow: Follow
) -> None:
    worker = add_worker(state)
    add_push(state, 3)
    assert follow("sync-replicas").arrived(worker) == ()
    await asyncio.sleep(0)
    assert link.sent == [Arrived((0,), (1,), (3,), (True,))]


async def test_pull_is_not_reported_for_it_needs_no_agreement(
    state: ShardState, link: FakeLink, follow: Follow
) -> None:
    worker = add_worker(state, pending=Pending(Pull(), None))
    assert follow("sync-replicas").arrived(worker) == ()
    await asyncio.sleep(0)
    assert link.sent == []


async def test_push_is_decided_here_under_any_other_policy(
    state: ShardState, link: FakeLink, follow: Follow
) -> None:
    worker = add_worker(state)
    add_push(state, 3)
    orders = follow("hogwild").arrived(worker)
    assert [*orders] == [(0, Apply(0)), (0, Answer(0, 1, 3))]
    assert link.sent == []


@pytest.mark.parametrize("released", [6, 7], ids=["the push before", "this push"])
async def test_push_that_was_released_during_a_switch_is_not_ordered_once_more(
    released: int, state: ShardState, link: FakeLink, follow: Follow
) -> None:
    """The leader counted it under hogwild; its release overtook a switch, and one more came."""
    request = Asked()
    worker = add_worker(state, early=Answer(0, 1, released))
    follower = follow("sync-replicas")
    add_push(state, 7, request)
    follower.executor.carry_out(follower.arrived(worker))
    is_counted = released == 7
    assert state.version == is_counted
    follower.on_orders(Asked(over_link=True), Orders(1, (Drop(3, "it was late"),)))
    switch = Switch("sync-replicas:aggregate=1")
    follower.on_orders(Asked(over_link=True), Orders(2, (SWITCH, switch)))
    assert state.version == len(request.replies) == is_counted, "decided by the leader again"
    follower.on_orders(Asked(over_link=True), Orders(4, (SWITCH,)))
    assert (state.version, len(request.replies)) == (1, 1)


async def test_orders_that_come_again_beside_new_ones_are_logged_once(follow: Follow) -> None:
    log = OrderLog(workers=2)
    follower = follow("sync-replicas", log)
    first, second = Answer(1, 1), Answer(2, 1)
    saved = Saved(0, "sync-replicas", LedgerState(0, (), 0))
    follower.on_orders(Asked(over_link=True), Orders(1, (first,)))
    follower.on_orders(Asked(over_link=True), Orders(1, (first, second), saved))
    assert log.last == LastOrders(1, 1, (first, second), saved)


async def test_push_is_ordered_once_though_its_release_waits_before_those_orders(
    state: ShardState, follow: Follow
) -> None:
    """The leader counted it before the switch; here it comes while something takes long."""
    request, follower, done = Asked(), follow("hogwild"), asyncio.Event()
    worker, go_on = add_worker(state), threading.Event()
    queue = follower.executor.work
    queue.put(go_on.wait, lambda _: None, rare=True)
    release = Answer(0, 1, 7)
    follower.on_orders(Asked(over_link=True), Orders(1, (SWITCH, release)))
    add_push(state, 7, request)
    follower.executor.carry_out(follower.arrived(worker))
    go_on.set()
    follower.executor.after_orders(lambda: follower.executor.after_orders(done.set))
    await within(done.wait())
    assert (state.version, len(request.replies)) == (1, 1)


async def test_switch_is_reported_to_the_leader_at_once(
    state: ShardState, link: FakeLink, follow: Follow
) -> None:
    follower = follow("sync-replicas")
    follower.on_orders(Asked(over_link=True), Orders(1, (SWITCH,)))
    assert link.sent == [ShardReport(1, 0, state.shard.layout.nbytes)]


async def test_measure_is_reported_at_once_and_not_done_before_its_update(
    state: ShardState, link: FakeLink, follow: Follow
) -> None:
    state.shard.update = replace(state.shard.update, clip_norm=1.0)
    state.shard.take_over_rate()
    add_worker(state)
    add_push(state, 1)
    follower, update = follow("sync-replicas"), Reduce((0,))
    square = state.shard.square_of(update)
    follower.on_orders(Asked(over_link=True), Orders(1, (Measure(update, 5),)))
    assert link.sent == [ShardReport(0, 0, state.shard.layout.nbytes, "", 5, f"{square:x}")]
    follower.on_orders(Asked(over_link=True), Orders(2, (Reduce((0,), float(square)),)))
    assert (state.orders, state.version) == (2, 1)


async def test_orders_are_taken_once_and_in_order(state: ShardState, follow: Follow) -> None:
    follower, drop = follow("sync-replicas"), Drop(3, "it was late")
    follower.on_orders(Asked(over_link=True), Orders(2, (drop,)))
    assert state.orders == 0, "order 1 was lost"
    for _ in range(2):
        follower.on_orders(Asked(over_link=True), Orders(1, (drop, drop)))
        assert state.orders == 2


async def test_orders_of_another_generation_are_passed_over(
    state: ShardState, follow: Follow
) -> None:
    follower = follow("sync-replicas")
    follower.on_orders(Asked(generation=2, over_link=True), Orders(1, (Drop(3, "it was late"),)))
    assert state.orders == 0


async def test_orders_are_taken_from_the_leader_alone(follow: Follow) -> None:
    with pytest.raises(RefusedError):
        follow("sync-replicas").on_orders(Asked(), Orders(1, (SWITCH,)))
