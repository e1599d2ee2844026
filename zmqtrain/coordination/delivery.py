"""Delivers the coordinator's orders to every shard, including this one, in the same sequence.

This shard's own orders have numbers; its segment holds the number of the last one carried out, so
that the rest is known after a restart. The other shards get the orders that concern them, with
numbers of their own, until they report them as carried out.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from zmqtrain.actors.actor import Request, guarded
from zmqtrain.actors.task import JobActor
from zmqtrain.config.cluster import Role
from zmqtrain.coordination.peers import Peer, PeerTable
from zmqtrain.observe.logs import StateLogger
from zmqtrain.policies import make_policy
from zmqtrain.protocol.checkpoint import LastOrders, Saved
from zmqtrain.protocol.orders import Answer, Numbered, Order, Rate, Snapshot, Switch
from zmqtrain.store import segment_layout
from zmqtrain.wire.messages import BATCH, Orders

log = logging.getLogger(__name__)


class OrderDelivery:
    """The leader's orders under way."""

    def __init__(
        self,
        host: JobActor,
        peers: PeerTable,
        words: memoryview,
        saved: Callable[[], Saved | None] | None = None,
    ) -> None:
        """``host``: ps 0. ``words``: those of its shard's segment.

        ``saved``: the content of a checkpoint after all orders given, if the others need it.
        """
        self._peers = peers
        self._words = words
        self._send_to_all = host.send_to_all
        self._send_guarded = guarded(self._send_now, host.crash)
        self._others = range(1, host.plan.shards)
        self._heartbeat_s = host.timing.heartbeat_s
        self._saved = saved
        self._coordinated = True  # the policy, by the orders so far
        self._given = 0  # number of this shard's last order
        self._own: deque[Numbered] = deque()  # held until all know the last switch
        self._under_way: deque[Numbered] = deque()  # own, perhaps not carried out
        self.sent = 0  # number of the others' last order
        self._switch = 0  # number of the last order that all must know first
        self._to_send: list[Numbered] = []  # to the others, at the end of this turn
        self._to_answer: set[int] = set()  # shards that have reported in this turn
        self._unacknowledged: deque[Numbered] = deque()
        self._acknowledged: dict[int, int] = {}
        self._states = StateLogger(log)

    def begin(self, policy: str) -> None:
        """Count from 0 again, under this policy: a new generation."""
        self._coordinated = make_policy(policy).coordinated
        self._given = self.sent = self._switch = 0
        for queue in (self._own, self._under_way, self._unacknowledged, self._to_send):
            queue.clear()
        self._acknowledged.clear()
        self._words[segment_layout.ORDERS] = self._words[segment_layout.ACKNOWLEDGED] = 0
        for peer in self._peers:
            peer.report = None

    def give(self, orders: Sequence[Order], *, again: bool = False) -> None:
        """Number orders and send the other shards theirs; :meth:`due` returns this shard's.

        ``again``: the previous process has sent them.
        """
        if self._others:
            numbered = self._number(self._concerning_others(orders))
            if not again:
                self._send(numbered)
        for order in orders:
            self._given += 1
            self._own.append((self._given, order))

    def send_others(self, orders: Sequence[Order]) -> None:
        """Give orders to the other shards only."""
        self._send(self._number(orders))

    def answer(self, shard: int) -> None:
        """Answer a shard's report with orders, even if there are none."""
        self._send_soon()
        self._to_answer.add(shard)

    @property
    def is_done(self) -> bool:
        """Whether all other shards have reported all of their orders as carried out."""
        return self._others_have(self.sent)

    def due(self) -> Sequence[Numbered]:
        """Return this shard's new orders.

        There are none while another shard does not know a switch or a rate: it would treat the next
        push of a worker released here by the old one.
        """
        if not self._own or not self._others_have(self._switch):
            return ()
        orders = tuple(self._own)
        self._own.clear()
        done = self._words[segment_layout.ORDERS]
        while self._under_way and self._under_way[0][0] <= done:
            self._under_way.popleft()
        self._under_way += orders
        return orders

    async def keep_others(self) -> None:
        """Catch the other shards up once a heartbeat."""
        while True:
            await asyncio.sleep(self._heartbeat_s)
            self.catch_up()

    def catch_up(self) -> None:
        """Send missing orders to other shards again; forget those that all of them have."""
        for shard in self._others:
            self._keep(shard)
        everyone = min(self._acknowledged.get(shard, 0) for shard in self._others)
        words = self._words
        words[segment_layout.ACKNOWLEDGED] = max(words[segment_layout.ACKNOWLEDGED], everyone)
        self._forget_acknowledged()

    @property
    def undone(self) -> list[Numbered]:
        done = self._words[segment_layout.ORDERS]
        own = [*self._under_way, *self._own]
        return [(number, order) for number, order in own if number > done]

    def last(self, generation: int) -> LastOrders | None:
        """Return the last orders that another shard may lack; None without copies."""
        if self._saved is None:
            return None
        orders = tuple(order for _, order in self._unacknowledged)
        return LastOrders(generation, self.sent + 1 - len(orders), orders, self._saved())

    def state(self) -> dict[str, Any]:
        """Return the state for :meth:`restore`, as plain data and orders."""
        return {
            "coordinated": self._coordinated,
            "given": self._given,
            "own": self.undone,
            "sent": self.sent,
            "switch": self._switch,
            "unacknowledged": list(self._unacknowledged),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore this state; :meth:`give` later orders ``again``, then resume."""
        self._coordinated, self._given = state["coordinated"], state["given"]
        self._own = deque(state["own"])
        self.sent, self._switch = state["sent"], state["switch"]
        self._unacknowledged = deque(state["unacknowledged"])

    def resume(self) -> None:
        """Make due the orders that the previous life did not carry out."""
        self._forget_acknowledged()
        done = self._words[segment_layout.ORDERS]
        self._own = deque((number, order) for number, order in self._own if number > done)

    def _forget_acknowledged(self) -> None:
        known = self._words[segment_layout.ACKNOWLEDGED]
        while self._unacknowledged and self._unacknowledged[0][0] <= known:
            self._unacknowledged.popleft()

    def _number(self, orders: Iterable[Order]) -> list[Numbered]:
        numbered = []
        for order in orders:
            self.sent += 1
            numbered.append((self.sent, order))
            if isinstance(order, Switch | Rate):
                self._switch = self.sent
        self._unacknowledged += numbered
        return numbered

    def _concerning_others(self, orders: Sequence[Order]) -> list[Order]:
        """Return the orders that the other shards need: all, while the policy is coordinated.

        Under any other they apply and release by themselves. Workers held for a switch are always
        released by orders: the other shards may hold them, too, under the old policy.
        """
        always: tuple[type, ...] = Switch, Snapshot, Rate
        concern = []
        for order in orders:
            if self._coordinated or isinstance(order, always):
                concern.append(order)
            if isinstance(order, Switch):
                self._coordinated = make_policy(order.policy).coordinated
                always += (Answer,)
        return concern

    def _send(self, numbered: Sequence[Numbered]) -> None:
        """Send orders together with all others of this turn of the event loop."""
        if numbered:
            self._send_soon()
        self._to_send += numbered

    def _send_soon(self) -> None:
        if not self._to_send and not self._to_answer:
            asyncio.get_running_loop().call_soon(self._send_guarded)

    def _send_now(self) -> None:
        numbered, self._to_send = self._to_send, []
        shards, self._to_answer = self._to_answer, set()
        if numbered:
            self._send_to(self._others, numbered)
        elif shards:
            self._send_to_all(self._contacts(sorted(shards)), Orders(self.sent + 1, ()))

    def _send_to(self, shards: Iterable[int], numbered: Sequence[Numbered]) -> None:
        contacts = self._contacts(shards)
        for begin in range(0, len(numbered), BATCH):
            part = numbered[begin : begin + BATCH]
            message = Orders(part[0][0], tuple(order for _, order in part))
            if self._saved is not None and part[-1][0] == self.sent:
                message.saved = self._saved()
            self._send_to_all(contacts, message)

    def _contacts(self, shards: Iterable[int]) -> list[Request]:
        peers = [self._peers.get(Role.PS, shard) for shard in shards]
        return [peer.contact for peer in peers if peer and not peer.gone and peer.contact]

    def _others_have(self, number: int) -> bool:
        """Return whether all other shards have reported the orders up to this one."""
        for shard in self._others:
            peer = self._peers.get(Role.PS, shard)
            if (0 if peer is None else peer.orders) < number:
                return False
        return True

    def _keep(self, shard: int) -> None:
        peer = self._peers.get(Role.PS, shard)
        if peer is None:
            return
        got = peer.orders
        stuck = got == self._acknowledged.get(shard, -1)
        self._acknowledged[shard] = got
        if stuck and (first := self.send_missing(peer)):
            self._states.state(shard, f"ps {shard}: sending orders from {first} on again")

    def send_missing(self, peer: Peer) -> int:
        """Send a ps the orders that it has not reported again; return the first number, 0: none."""
        # A new life has not reported yet. It has all orders that are no longer kept.
        kept = self._unacknowledged
        missing = [(number, order) for number, order in kept if number > peer.orders]
        self._send_to([peer.index], missing)
        return missing[0][0] if missing else 0
