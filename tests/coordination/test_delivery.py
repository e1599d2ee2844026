"""A restarted leader's delivery: it knows the orders to carry out and to send, and no others."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

import pytest

from tests.asking import Asked
from tests.coordination.parts import add_peer, make_host
from zmqtrain.coordination.delivery import OrderDelivery
from zmqtrain.coordination.peers import PeerTable
from zmqtrain.coordination.state import pack, unpack
from zmqtrain.protocol.orders import Answer, Apply, Numbered, Order, Switch
from zmqtrain.store.segment import Segment
from zmqtrain.store.segment_layout import ACKNOWLEDGED, ORDERS, SegmentLayout
from zmqtrain.wire.messages import BATCH, Orders, ShardReport

APPLY = Apply(0)


class FirstShard:
    """Ps 0 of two: it carries out what is due, and hears what ps 1 is told."""

    def __init__(self) -> None:
        self.peers = PeerTable(5.0, 2, lambda peer: False)
        self.segment = Segment.private(SegmentLayout(4, []))
        self.follower = add_peer(self.peers, "ps 1")
        self.carried_out: list[Numbered] = []

    @property
    def sent(self) -> list[Orders]:
        return cast(Asked, self.follower.contact).sent

    def follower_reports(self, orders: int) -> None:
        self.follower.report = ShardReport(orders, 0, 16)

    def carry_out(self, orders: Sequence[Numbered]) -> None:
        self.carried_out += orders
        if orders:
            self.segment.words[ORDERS] = orders[-1][0]

    def delivery(self) -> OrderDelivery:
        return OrderDelivery(make_host(shards=2), self.peers, self.segment.words)


def begun() -> tuple[FirstShard, OrderDelivery]:
    shard = FirstShard()
    delivery = shard.delivery()
    delivery.begin("sync-replicas")
    return shard, delivery


def restarted(shard: FirstShard, state: bytes, since: list[Order]) -> OrderDelivery:
    """Return the delivery of the next life: restored from a state, and told what came after it."""
    delivery = shard.delivery()
    delivery.restore(unpack(state))
    delivery.give(since, again=True)
    delivery.resume()
    return delivery


async def test_restarted_delivery_has_due_the_unfinished_orders() -> None:
    shard, delivery = begun()
    delivery.give([APPLY] * 3)
    shard.carry_out(delivery.due())
    state = pack(delivery.state())
    delivery.give([APPLY] * 2)
    delivery.due()  # it is killed before it comes to these
    shard.carry_out(restarted(shard, state, [APPLY] * 2).due())
    assert [number for number, _ in shard.carried_out] == [1, 2, 3, 4, 5]


async def test_restarted_delivery_keeps_only_unacknowledged_orders() -> None:
    shard, delivery = begun()
    state = pack(delivery.state())
    for _ in range(5000):
        delivery.give([APPLY])
    shard.carry_out(delivery.due())
    shard.segment.words[ACKNOWLEDGED] = 4998
    after = restarted(shard, state, [APPLY] * 5000)
    assert [number for number, _ in after.state()["unacknowledged"]] == [4999, 5000]
    assert len(pack(after.state())) < 1000


async def test_delivery_is_done_when_the_others_tell_of_all_their_orders() -> None:
    shard, delivery = begun()
    assert delivery.is_done
    delivery.give([APPLY] * 2)
    for told, is_done in ((1, False), (2, True)):
        shard.follower_reports(told)
        assert delivery.is_done == is_done


async def test_orders_wait_until_the_others_know_of_a_switch() -> None:
    shard, delivery = begun()
    delivery.give([APPLY, Switch("hogwild"), Answer(0, 1, 1)])
    assert delivery.due() == ()
    await asyncio.sleep(0)
    assert [orders.number for orders in shard.sent] == [1]
    shard.follower_reports(2)
    assert [number for number, _ in delivery.due()] == [1, 2, 3]
    delivery.give([APPLY])  # by the policy now, every shard decides by itself
    await asyncio.sleep(0)
    assert len(shard.sent) == 1


async def test_orders_sent_again_to_a_new_life_of_a_shard_keep_their_numbers() -> None:
    """It has not told yet what it got; what all shards had got is kept no more."""
    shard, delivery = begun()
    orders = [Apply(worker) for worker in range(4)]
    delivery.give(orders)
    await asyncio.sleep(0)
    shard.follower_reports(2)
    delivery.catch_up()
    shard.follower.report = None
    shard.sent.clear()
    for _ in range(2):
        delivery.catch_up()
    assert shard.sent == [Orders(3, tuple(orders[2:]))]


async def test_orders_sent_again_and_again_are_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    shard, delivery = begun()
    with caplog.at_level("INFO"):
        for reported in (0, 1):
            delivery.give([APPLY])
            shard.follower_reports(reported)
            for _ in range(5):
                delivery.catch_up()
    assert [record.message for record in caplog.records] == [
        "ps 1: sending orders from 1 on again",
        "ps 1: sending orders from 2 on again",
    ]


async def test_orders_of_one_turn_travel_together_but_no_more_than_a_message_may_hold() -> None:
    shard, delivery = begun()
    for _ in range(BATCH + 2):
        delivery.give([APPLY])
    await asyncio.sleep(0)
    expected = [(1, BATCH), (BATCH + 1, 2)]
    assert [(sent.number, len(sent.orders)) for sent in shard.sent] == expected
    delivery.catch_up()
    shard.sent.clear()
    delivery.catch_up()
    assert [sent.number for sent in shard.sent] == [1, BATCH + 1]


async def test_report_is_answered_by_the_orders_of_its_turn_or_by_none() -> None:
    shard, delivery = begun()
    delivery.answer(1)
    await asyncio.sleep(0)
    assert shard.sent == [Orders(1, ())]
    delivery.answer(1)
    delivery.give([APPLY])
    await asyncio.sleep(0)
    assert shard.sent[1:] == [Orders(1, (APPLY,))]
