"""The decider of ps 1, 2, ..., which takes its orders from the leader.

Under a coordinated policy it reports arrivals, and the decisions come back as orders. Under any
other one it applies and releases every push at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any

from zmqtrain.actors.actor import Request, guarded
from zmqtrain.actors.link import Link
from zmqtrain.actors.task import JobActor
from zmqtrain.coordination.events import Measured
from zmqtrain.coordination.hand_over import OrderLog
from zmqtrain.errors import FencedError, RefusedError
from zmqtrain.policies import make_policy
from zmqtrain.protocol.checkpoint import LastOrders
from zmqtrain.protocol.orders import Answer, Apply, Numbered, Rate, Switch
from zmqtrain.server.decider import Decider, Handler
from zmqtrain.server.executor import Early, OrderOutcome, Refused
from zmqtrain.server.orphaned_shard import OrphanedShard
from zmqtrain.server.state import Pending, ShardState, WorkerRecord
from zmqtrain.store.journal import Journal
from zmqtrain.wire.control import ShardWritten
from zmqtrain.wire.messages import BATCH, Arrived, Orders, ShardReport

log = logging.getLogger(__name__)


class Follower(Decider):
    """Decides about a shard by the leader's orders, or alone where the policy leaves it to shards.

    The policy is kept in the segment's journal, for the next life of this ps.
    """

    def __init__(
        self,
        actor: JobActor,
        state: ShardState,
        link: Link,
        join: Callable[[], Coroutine[Any, Any, object]],
        order_log: OrderLog | None,
    ) -> None:
        """``link``: the link to the leader, which ``join`` joins.

        ``order_log``: if others have copies of this shard's part.
        """
        super().__init__(actor, state)
        self._link = link
        self._heartbeat_s = actor.timing.heartbeat_s
        self._join = join
        self._coordinated = make_policy(actor.job.policy).coordinated
        self._taken = 0  # number of the last order in the queue
        self._journal = Journal(state.shard.segment)
        self._unreported: list[tuple[int, int, int, bool]] = []
        self._awaits_orders = False  # a report has no answer yet
        self._send_guarded = guarded(self._send_reports, actor.crash)
        self._failure = ""  # why the update rule refused
        self._measured = Measured(0, 0, 0)  # the last one
        self._order_log = order_log

    async def run(self) -> None:
        """Join the leader, and report this shard's progress at once and with every heartbeat."""
        await self._join()
        self._actor.spawn(self._link.silence())
        while True:
            self._report_shard()
            if self._coordinated and self._state.initialised:
                reported_by = time.monotonic() - self._heartbeat_s
                for worker, pending in self._state.pending():
                    if pending.arrived_at < reported_by:
                        self._report_arrival(worker)  # the first may have been lost
            self._send_reports()  # the answer to the last one may have been lost
            await asyncio.sleep(self._heartbeat_s)
            if self._link.fenced:  # the leader has a new life
                await self._join()

    def on_orders(self, request: Request, message: Orders) -> None:
        if not request.over_link:
            raise RefusedError(f"{self._state.task} takes orders over its own link to ps 0 only")
        if request.envelope.generation != self._state.generation:
            return
        self._send_reports()
        if message.number > self._taken + 1:
            return  # earlier orders were lost; the leader sends them again
        orders = message.orders[self._taken + 1 - message.number :]
        if self._order_log is not None:
            generation, first = self._state.generation, self._taken + 1
            self._order_log.take(generation, first, orders, message.saved)
        for order in orders:
            self._taken += 1
            if isinstance(order, Switch):
                self._coordinated = make_policy(order.policy).coordinated
            self.executor.carry_out([(self._taken, order)])
        if any(isinstance(order, Switch) for order in orders):
            held = [] if self._coordinated else self._state.pending()
            self.executor.after_orders(partial(self._after_switch, held))
        elif any(isinstance(order, Rate) for order in orders):
            self.executor.after_orders(self._report_shard)  # the leader waits for it

    # As a decider

    @property
    def handlers(self) -> dict[type, Handler]:
        return {Orders: self.on_orders}

    def arrived(self, worker: WorkerRecord) -> Sequence[Numbered]:
        if self._is_free(worker):
            return _own_orders(worker)
        self._report_arrival(worker)
        return ()

    def note(self, outcome: OrderOutcome) -> None:
        match outcome:
            case Refused(error):
                log.error("%s", error)
                self._failure = str(error)  # the leader is sent a report, and the chief saves
            case Switch(policy):
                self._journal.begin(policy.encode())
            case Measured():
                self._measured = outcome  # sent again with every report
                self._report_shard()
            case Early(worker):
                self.executor.carry_out(self.arrived(worker))
            case ShardWritten():
                self._actor.spawn(self._deliver(outcome))

    def at_rest(self, call: Callable[[], None]) -> None:
        call()  # rosters are of jobs with one shard

    def begin(self) -> bool:
        """Each generation numbers its orders from 1; the first may switch the policy."""
        self._taken = self._state.orders = 0
        self._measured = Measured(0, 0, 0)
        if self._order_log is not None:
            self._order_log.begin()
        self._unreported.clear()
        self._awaits_orders = False
        policy = self._actor.job.policy
        self._coordinated = make_policy(policy).coordinated
        if self._link.joined:
            self._report_shard()  # the leader may have begun, and sent orders, before
        return self._journal.begin(policy.encode())

    def orphan(self) -> OrphanedShard | None:
        if self._order_log is None:
            return None
        state, last = self._state, self._order_log.last
        if last is None:  # it was restarted and has received no order since
            last = LastOrders(state.generation, state.orders + 1, (), None)
        return OrphanedShard(state.shard, last, state.orders)

    def recover(self) -> None:
        self._taken = self._state.orders
        self._coordinated = make_policy(self._journal.read()[0].decode()).coordinated
        held = self._state.pending()
        self._decide_held((worker, each) for worker, each in held if self._is_free(worker))

    # Decisions of this shard

    def _is_free(self, worker: WorkerRecord) -> bool:
        """Return whether this shard decides on the worker's request without the leader.

        The request may have been released before it came: a pull, or a push before a switch.
        """
        return worker.is_released or not self._coordinated

    def _after_switch(self, held: Iterable[tuple[WorkerRecord, Pending]]) -> None:
        self._report_shard()  # the leader waits for this report
        self._decide_held(held)

    def _decide_held(self, held: Iterable[tuple[WorkerRecord, Pending]]) -> None:
        """Decide here on held requests, which the leader counts as decided since the switch."""
        for worker, pending in tuple(held):
            if worker.pending is pending:
                self.executor.carry_out(_own_orders(worker))

    # Reports to the leader

    def _report_shard(self) -> None:
        state, last = self._state, self._measured
        report = ShardReport(
            orders=state.orders,
            version=state.version,
            nbytes=state.shard.layout.nbytes,
            failure=self._failure,
            measured=last.number,
            square=f"{last.square:x}",
            tables=state.shard.table_status(),
            moves=state.shard.moves,
        )
        self._link.send(report)

    def _report_arrival(self, worker: WorkerRecord) -> None:
        push = worker.pushed
        if push is None:
            return  # a pull needs no agreement
        if not self._unreported and not self._awaits_orders:
            asyncio.get_running_loop().call_soon(self._send_guarded)
        ready = (worker.index, worker.incarnation, push.sequence, push.finite)
        self._unreported.append(ready)

    def _send_reports(self) -> None:
        """Report all arrivals since the last answer in one message, to spare a busy leader."""
        pushes, self._unreported = self._unreported, []
        self._awaits_orders = bool(pushes)
        for begin in range(0, len(pushes), BATCH):
            self._link.send(Arrived(*zip(*pushes[begin : begin + BATCH], strict=True)))

    async def _deliver(self, message: ShardWritten) -> None:
        """Send a message until the leader has it, even if this ps must join again first."""
        while True:
            try:
                await self._link.request(message, reason="it waits for this shard's file")
                return
            except FencedError:
                await asyncio.sleep(self._heartbeat_s)


def _own_orders(worker: WorkerRecord) -> list[Numbered]:
    """Return the orders, unless given before, that apply a worker's gradient and answer it."""
    pending = worker.pending
    if pending is None or pending.is_ordered:
        return []
    pending.is_ordered = True
    answer = Answer(worker.index, worker.incarnation, pending.sequence)
    return [(0, answer)] if pending.is_decided else [(0, Apply(worker.index)), (0, answer)]
