"""The part of ps 1, 2, ... that takes its orders from the leader.

Under a coordinated policy an arrival is only reported; what becomes of it comes back as orders.
Under any other every push is applied and released here at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from zmqtrain.actors.actor import Request
from zmqtrain.actors.callbacks import guarded
from zmqtrain.actors.joining import join_all
from zmqtrain.config.cluster import Role, Task
from zmqtrain.coordination.membership import Peer
from zmqtrain.errors import ConfigError, FencedError, RefusedError, ZmqTrainError
from zmqtrain.policies import make_policy
from zmqtrain.store import segment_layout
from zmqtrain.store.journal import Journal
from zmqtrain.wire.messages import (
    BATCH,
    Arrived,
    Order,
    Orders,
    Push,
    ReadyPush,
    ShardFailed,
    ShardFile,
    ShardReport,
    ShardWritten,
)

if TYPE_CHECKING:
    from zmqtrain.server.direction import Pending
    from zmqtrain.server.executor import Applied
    from zmqtrain.server.server import ParameterServer

log = logging.getLogger(__name__)


class Follower:
    """Direction of every ps but the first."""

    def __init__(self, ps: ParameterServer) -> None:
        self.ps = ps
        self.policy = ps.job.policy
        self._coordinated = make_policy(self.policy).coordinated
        self._taken = 0  # number of the last order that was taken up
        self._journal = Journal(ps.shard.segment)
        self._unreported: list[ReadyPush] = []
        self._awaits_orders = False  # which answer a report
        self._failure = ""  # why the update rule refused
        self.link = ps.link(Task(Role.PS, 0), ps.ps_endpoints[0])
        ps.on(Orders, self._on_orders)
        ps.spawn(self._follow())

    async def _follow(self) -> None:
        await join_all(self.ps, [self.link])
        self.ps.spawn(self.link.silence())
        while True:
            await asyncio.sleep(self.ps.timing.heartbeat_s)
            if self.link.fenced:  # the leader has a new life
                await join_all(self.ps, [self.link])
            self._report_shard()
            if self._coordinated and self.ps.initialised:
                reported_by = time.monotonic() - self.ps.timing.heartbeat_s
                for worker, pending in self.ps.pending.items():
                    if pending.arrived_at < reported_by:
                        self._report_push(worker, pending)  # the first report may have been lost
            self._send_reports()  # so may the answer to the last one

    def _report_shard(self) -> None:
        shard = self.ps.shard
        orders = shard.segment.words[segment_layout.ORDERS]
        nbytes = shard.layout.nbytes
        self.link.send(ShardReport(orders, shard.version, nbytes, self._failure))

    # Direction

    def generation_began(self) -> None:
        """Each generation numbers its orders anew; the first may be to switch the policy."""
        self._taken = self.ps.shard.segment.words[segment_layout.ORDERS] = 0
        self._unreported.clear()
        self._awaits_orders = False
        self._coordinated = make_policy(self.ps.job.policy).coordinated
        self.switched(self.ps.job.policy)

    def recovered(self) -> None:
        self._taken = self.ps.shard.segment.words[segment_layout.ORDERS]
        self.policy = self._journal.read()[0].decode()
        self._coordinated = make_policy(self.policy).coordinated
        held = tuple(self.ps.pending.items())
        self._decide_held([each for each in held if self._is_free(*each)])

    def switched(self, spec: str) -> None:
        self.policy = spec
        self._journal.begin(spec.encode())

    def joined(self, peer: Peer) -> None:
        """The leader says what follows from it."""

    def left(self, peer: Peer) -> None:
        """The leader says what follows from it."""

    def check(self, worker: int, push: Push) -> None:
        """Leases are the leader's business."""

    def watch(self) -> None:
        """The leader gives the job up, if anyone does."""

    def arrived(self, worker: int, pending: Pending) -> None:
        if self._is_free(worker, pending):
            self._carry_out(self._at_once(worker, pending))
        else:
            self._report_push(worker, pending)

    def applied(self, applied: Applied) -> None:
        """The leader keeps the figures."""

    def cannot_update(self, error: ConfigError) -> None:
        log.error("%s", error)
        self._failure = str(error)  # the leader hears of it, and the chief saves what was learned

    def written(self, directory: str, file: ShardFile) -> None:
        self.ps.spawn(self._tell_of_file(ShardWritten(directory, file)))

    def not_written(self, directory: str, error: ZmqTrainError) -> None:
        log.error("this shard's part of the checkpoint was not written: %s", error)
        self.ps.spawn(self._tell_of_file(ShardFailed(directory, f"{self.ps.task}: {error}")))

    async def _tell_of_file(self, message: ShardWritten | ShardFailed) -> None:
        """Tell the leader until it has heard it, though this ps may have to join again first."""
        while True:
            try:
                await self.link.request(message, reason="it waits for this shard's file")
                return
            except FencedError:
                await asyncio.sleep(self.ps.timing.heartbeat_s)

    def _is_free(self, worker: int, pending: Pending) -> bool:
        """Whether the leader says nothing of it (any more).

        It may have been released before it came: a pull needs no agreement, nor did a push before
        a switch.
        """
        return self._is_released(worker, pending) or not self._coordinated

    def _is_released(self, worker: int, pending: Pending) -> bool:
        peer = self.ps.peers.get(Role.WORKER, worker)
        return peer is not None and peer.released == pending.sequence

    def _at_once(self, worker: int, pending: Pending) -> list[Order]:
        release = Order("release", (worker,), "", pending.incarnation, pending.sequence)
        if pending.sequence == 0 or not pending.finite:
            return [release]
        return [Order("apply", (worker,)), release]

    def _report_push(self, worker: int, pending: Pending) -> None:
        if not pending.sequence:
            return  # a pull needs no agreement
        if not self._unreported and not self._awaits_orders:
            send = guarded(self._send_reports, self.ps.crash)
            asyncio.get_running_loop().call_soon(send)
        push = ReadyPush(worker, pending.incarnation, pending.sequence, pending.finite)
        self._unreported.append(push)

    def _send_reports(self) -> None:
        """Report together what has arrived since the leader answered the last report.

        So a leader that has much to do gets few messages.
        """
        pushes, self._unreported = self._unreported, []
        self._awaits_orders = bool(pushes)
        for begin in range(0, len(pushes), BATCH):
            self.link.send(Arrived(tuple(pushes[begin : begin + BATCH])))

    def _on_orders(self, request: Request, message: Orders) -> None:
        if not request.over_link:
            raise RefusedError(f"{self.ps.task} takes orders over its own link to ps 0 only")
        if request.envelope.generation != self.ps.generation:
            return
        self._send_reports()
        if message.number > self._taken + 1:
            return  # orders before these were lost; the leader sends them again
        orders = message.orders[self._taken + 1 - message.number :]
        for order in orders:
            self._taken += 1
            self._obey(self._taken, order)
        if any(order.kind == "switch" for order in orders):
            held = () if self._coordinated else tuple(self.ps.pending.items())
            self.ps.executor.after_orders(partial(self._after_switch, held))

    def _after_switch(self, held: Sequence[tuple[int, Pending]]) -> None:
        self._report_shard()  # the leader waits to hear that it is known here
        # What was released meanwhile has its orders already.
        self._decide_held([each for each in held if not self._is_released(*each)])

    def _decide_held(self, held: Sequence[tuple[int, Pending]]) -> None:
        """Decide here on what is still held: the leader takes it for decided since the switch."""
        for worker, pending in held:
            if self.ps.pending.get(worker) is pending:
                orders = self._at_once(worker, pending)
                self._carry_out(orders[-1:] if pending.result else orders)

    def _carry_out(self, orders: Sequence[Order]) -> None:
        """Carry out what this shard orders itself."""
        self.ps.executor.carry_out((0, order) for order in orders)

    def _obey(self, number: int, order: Order) -> None:
        if order.kind == "switch":
            self._coordinated = make_policy(order.text).coordinated
        self.ps.executor.carry_out([(number, order)])
