"""What the leader's delivery knows after a restart: what is to be done and sent, and no more."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from zmqtrain.coordination.delivery import OrderDelivery
from zmqtrain.coordination.state import pack, unpack
from zmqtrain.store import segment_layout
from zmqtrain.wire.messages import BATCH, Order, Orders

APPLY = Order("apply", (0,))


class LeadShard:
    """As much of ps 0 of two as a delivery sees: orders carried out, and what ps 1 is told."""

    def __init__(self) -> None:
        self.shards = 2
        self.words = [0] * segment_layout.WORDS
        self.shard = SimpleNamespace(segment=SimpleNamespace(words=self.words))
        self.executor = SimpleNamespace(carry_out=self._carry_out)
        self.told: list[Orders] = []
        self.follower = SimpleNamespace(orders=0, report=None, gone=False, contact="its")
        self.peers = self
        self.carried_out: list[tuple[int, Order]] = []
        self.carries_out = True
        self.crash = print

    def __iter__(self) -> Any:
        return iter([self.follower])

    def get(self, role: str, index: int) -> Any:
        return self.follower

    def send_to_all(self, contacts: Any, message: Orders) -> None:
        self.told += [message for _ in contacts]

    def _carry_out(self, orders: Any) -> None:
        if self.carries_out:
            self.carried_out += orders
            self.words[segment_layout.ORDERS] = self.carried_out[-1][0]


def relay_of(leader: LeadShard) -> OrderDelivery:
    return OrderDelivery(leader)  # type: ignore[arg-type]


def restarted(leader: LeadShard, state: bytes, since: list[Order]) -> OrderDelivery:
    """Return the delivery of the next life: restored from a state, and told what came after it."""
    delivery = relay_of(leader)
    delivery.restore(unpack(state))
    delivery.give(since, again=True)
    leader.carries_out = True
    delivery.resume()
    return delivery


async def test_restarted_relay_carries_out_what_was_not() -> None:
    leader = LeadShard()
    delivery = relay_of(leader)
    delivery.begin("sync-replicas")
    delivery.give([APPLY] * 3)
    state = pack(delivery.state())
    leader.carries_out = False  # it is killed before it comes to these
    delivery.give([APPLY] * 2)
    restarted(leader, state, [APPLY] * 2)
    assert [number for number, _ in leader.carried_out] == [1, 2, 3, 4, 5]


async def test_restarted_relay_keeps_for_others_only_what_they_have_not_acknowledged() -> None:
    leader = LeadShard()
    delivery = relay_of(leader)
    delivery.begin("sync-replicas")
    state = pack(delivery.state())
    for _ in range(5000):
        delivery.give([APPLY])
    leader.words[segment_layout.ACKNOWLEDGED] = 4998
    after = restarted(leader, state, [APPLY] * 5000)
    assert [number for number, _ in after.state()["unacknowledged"]] == [4999, 5000]
    assert len(pack(after.state())) < 1000


async def test_relay_is_done_when_the_others_tell_of_all_their_orders() -> None:
    leader = LeadShard()
    delivery = relay_of(leader)
    delivery.begin("sync-replicas")
    assert delivery.is_done
    delivery.give([APPLY] * 2)
    for told, is_done in ((1, False), (2, True)):
        leader.follower.orders = told
        assert delivery.is_done == is_done


async def test_orders_wait_until_the_others_know_of_a_switch() -> None:
    leader = LeadShard()
    delivery = relay_of(leader)
    delivery.begin("sync-replicas")
    delivery.give([APPLY, Order("switch", text="hogwild"), Order("release", (0,))])
    assert leader.carried_out == []
    await asyncio.sleep(0)  # the orders of one turn of the event loop are sent at its end
    assert [orders.number for orders in leader.told] == [1]
    leader.follower.orders = 2
    delivery.carry_out_own()
    assert [number for number, _ in leader.carried_out] == [1, 2, 3]
    delivery.give([APPLY])  # by the policy now, every shard decides by itself
    await asyncio.sleep(0)
    assert len(leader.told) == 1


async def test_orders_of_one_turn_travel_together_but_no_more_than_a_message_may_hold() -> None:
    leader = LeadShard()
    delivery = relay_of(leader)
    delivery.begin("sync-replicas")
    for _ in range(BATCH + 2):
        delivery.give([APPLY])
    await asyncio.sleep(0)
    assert [(sent.number, len(sent.orders)) for sent in leader.told] == [
        (1, BATCH),
        (BATCH + 1, 2),
    ]
    delivery.catch_up()
    leader.told.clear()
    delivery.catch_up()
    assert [sent.number for sent in leader.told] == [1, BATCH + 1]


async def test_report_is_answered_by_the_orders_of_its_turn_or_by_none() -> None:
    leader = LeadShard()
    delivery = relay_of(leader)
    delivery.begin("sync-replicas")
    delivery.answer(1)
    await asyncio.sleep(0)
    assert leader.told == [Orders(1, ())]
    delivery.answer(1)
    delivery.give([APPLY])
    await asyncio.sleep(0)
    assert leader.told[1:] == [Orders(1, (APPLY,))]


async def test_orders_sent_again_to_a_new_life_of_a_shard_keep_their_numbers() -> None:
    """It has not told yet what it got; what all shards had got is kept no more."""
    leader = LeadShard()
    delivery = relay_of(leader)
    delivery.begin("sync-replicas")
    orders = [Order("apply", (worker,)) for worker in range(4)]
    delivery.give(orders)
    leader.follower.orders = 2
    delivery.catch_up()
    leader.follower.orders = 0
    leader.told.clear()
    for _ in range(2):
        delivery.catch_up()
    assert leader.told == [Orders(3, tuple(orders[2:]))]
