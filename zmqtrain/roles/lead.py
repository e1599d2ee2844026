"""The lead shard's part of ps 0: it turns arrivals into orders for every shard.

The deciding itself is the coordinator's, which is pure; here are its clock, its messages and what
people want to know of the job.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from typing import TYPE_CHECKING

from zmqtrain.actors.actor import Request
from zmqtrain.coordination.coordinator import Coordinator
from zmqtrain.coordination.ledger import Ledger, LedgerState
from zmqtrain.coordination.statistics import Staleness, Throughput
from zmqtrain.errors import (
    CheckpointError,
    ConfigError,
    ExitCode,
    ProtocolError,
    ZmqTrainError,
)
from zmqtrain.optim import as_schedule
from zmqtrain.policies import make_policy
from zmqtrain.roles.desk import Desk
from zmqtrain.roles.peers import ORDERS, Peer
from zmqtrain.store.manifest import read_manifest
from zmqtrain.wire.messages import (
    Arrived,
    Order,
    Orders,
    Push,
    ShardFile,
)

if TYPE_CHECKING:
    from zmqtrain.roles.direction import Pending
    from zmqtrain.roles.execution import Applied
    from zmqtrain.roles.ps import ParameterServer

log = logging.getLogger(__name__)


class Lead:
    """Direction of ps 0 and, by orders, of every other ps."""

    def __init__(self, ps: ParameterServer) -> None:
        self.ps = ps
        self.policy = ps.job.policy
        self.coordinator: Coordinator | None = None
        self.staleness = Staleness()
        self.throughput = Throughput()
        self.examples = 0
        self.loss = float("nan")
        self.counts = dict.fromkeys(("applied", "dropped", "duplicate", "refused"), 0)
        self.failure = ""
        self.failure_code = ExitCode.OK
        self._peopled_at = time.monotonic()  # when a worker was last live
        self._coordinated = True  # whether the policy is, by the orders sent so far
        self._order_number = 0
        self._switch_number = 0  # of the last switch
        self._own: deque[Order] = deque()  # this shard's part, until all know of that switch
        self._unacknowledged: deque[tuple[int, Order]] = deque()
        self._acknowledged: dict[int, int] = {}
        rate = getattr(ps.job.optimizer, "learning_rate", None)
        self._learning_rate = None if rate is None else as_schedule(rate)
        metrics = ps.metrics
        metrics.global_step_target.set(ps.job.steps)
        metrics.expected_workers.set(ps.workers)
        self._show_policy()
        self.desk = Desk(self)
        ps.handlers[Arrived] = self._on_arrived
        if ps.ps > 1:
            ps.spawn(self._keep_followers())

    @property
    def step(self) -> int:
        return self.coordinator.version if self.coordinator else 0

    # Direction

    def initialized(self) -> None:
        ps = self.ps
        self._order_number = self._switch_number = 0
        self._own.clear()
        self._unacknowledged.clear()
        self._acknowledged.clear()
        for peer in ps.peers:
            peer.facts.pop(ORDERS, None)
        self._coordinated = make_policy(self.policy).coordinated
        self.desk.forget_saves()
        ledger, self.examples = self._restored_ledger()
        self.coordinator = Coordinator(
            make_policy(self.policy),
            shards=ps.ps,
            workers=ps.workers,
            steps=ps.job.steps,
            version=ps.shard.version,
            ledger=ledger,
            lookahead=ps.job.prefetch,
        )
        for peer in ps.peers:
            if peer.name[0] == "worker" and not peer.gone:
                self.coordinator.join(peer.name[1], peer.incarnation)
        if self.policy != ps.job.policy:
            self._send_followers([Order("switch", text=self.policy)])
        self.advance([])

    def heard(self, peer: Peer) -> None:
        if self._own and peer.name[0] == "ps":
            self._carry_out_own()

    def joined(self, peer: Peer) -> None:
        if peer.name[0] == "ps":
            self.desk.save_failed(CheckpointError(f"{peer} has a new life"))
        if peer.name[0] == "worker" and self.coordinator is not None:
            self.advance(self.coordinator.join(peer.name[1], peer.incarnation))

    def left(self, peer: Peer) -> None:
        if peer.name[0] == "worker" and self.coordinator is not None:
            self.ps.metrics.worker_step.forget(peer.name[1])
            self.advance(self.coordinator.leave(peer.name[1]))

    def check(self, worker: int, push: Push) -> None:
        if self.coordinator is not None and not self.coordinator.ledger.holds(worker, push.batch):
            raise ProtocolError(
                f"worker {worker} pushes batch {push.batch}, which it has no lease on"
            )

    def arrived(self, worker: int, pending: Pending) -> None:
        if self.coordinator is None:
            return
        if pending.sequence:
            self.loss = pending.loss
            self.ps.metrics.worker_step[worker].set(pending.sequence)
        refused = not pending.finite and not self.coordinator.finished
        self.advance(
            self.coordinator.arrived(
                worker, pending.sequence, 0, finite=pending.finite, batch=pending.batch
            )
        )
        if refused:
            self._count_refusal()

    def applied(self, applied: Applied) -> None:
        version = applied.version
        self.throughput.observe(version, applied.at)
        for push in applied.contributions:
            self.staleness.observe(max(0, version - 1 - push.version))
        self.ps.metrics.global_step.set(version)
        if self._learning_rate is not None:
            self.ps.metrics.learning_rate.set(self._learning_rate(version - 1))

    def cannot_update(self, error: ConfigError) -> None:
        self._fail(error.exit_code, str(error))

    def written(self, directory: str, file: ShardFile) -> None:
        self.desk.written(directory, file)

    def failed(self, error: ZmqTrainError) -> None:
        self.desk.save_failed(error)

    def watch(self) -> None:
        """Give the job up if nobody works on it, or someone has waited for too long."""
        coordinator, now = self.coordinator, time.monotonic()
        limit_s = self.ps.timing.join_timeout_s
        if coordinator is None or coordinator.finished or coordinator.members:
            self._peopled_at = now
        if now - self._peopled_at > limit_s:
            self._fail(ExitCode.PEER_LOST, f"no worker has been alive for {limit_s:g} s")
        for peer in self.ps.peers:
            if peer.facts.get("stuck"):
                self._fail(ExitCode.USAGE, f"{peer} cannot update its parameters: see its log")
        if coordinator is None:
            return
        waiting = list(coordinator.held())
        self.ps.metrics.waiting_workers.set(len(waiting))
        for held in waiting:
            pending = self.ps.pending.get(held.worker)
            if pending is not None and now - pending.arrived_at > limit_s:
                by = ", ".join(f"worker {index}" for index in held.by) or "a worker to join"
                self._fail(
                    ExitCode.PEER_LOST,
                    f"worker {held.worker} has waited {limit_s:g} s for {by}: {held.reason}",
                )

    # Orders

    def advance(self, orders: list[Order]) -> None:
        """Send orders to the other shards, carry out our own part, tell whoever watches."""
        if self.coordinator is None:
            return
        for order in orders:
            self._account(order)
        self._send_followers(orders)
        self._own += orders
        self._carry_out_own()
        if self.coordinator.finished:
            self.desk.closed()
        if self.coordinator.finished or self.failure:
            self.desk.notify()
        if self.coordinator.next_policy is None:
            self.desk.policy_settled(self.coordinator.policy)

    def _account(self, order: Order) -> None:
        match order.kind:
            case "apply" | "accumulate" | "reduce":
                self.counts["applied"] += len(order.workers)
                for worker in order.workers:
                    pending = self.ps.pending.get(worker)
                    self.examples += pending.examples if pending is not None else 0
            case "drop":
                self.counts["dropped"] += 1
            case "switch":
                self.policy = order.text
                self.ps.metrics.policy_switches.inc()
                self._show_policy()

    def _send_followers(self, orders: list[Order]) -> None:
        """Number the orders that concern the other shards and send them."""
        if self.ps.ps == 1 or self.coordinator is None:
            return
        concern = self._concerning_followers(orders)
        if not concern:
            return
        first = self._order_number + 1
        for order in concern:
            self._order_number += 1
            self._unacknowledged.append((self._order_number, order))
            if order.kind == "switch":
                self._switch_number = self._order_number
        for shard in range(1, self.ps.ps):
            self._tell_follower(shard, Orders(first, tuple(concern)))

    def _concerning_followers(self, orders: list[Order]) -> list[Order]:
        """Return the orders that the other shards need: all, while the policy is coordinated.

        Under any other they apply and release by themselves. What was held for a switch is
        released by orders in any case: under the old policy it may have been reported and held
        there too.
        """
        always = {"switch", "snapshot", "leave"}
        concern = []
        for order in orders:
            if self._coordinated or order.kind in always:
                concern.append(order)
            if order.kind == "switch":
                self._coordinated = make_policy(order.text).coordinated
                always.add("release")
        return concern

    def _carry_out_own(self) -> None:
        """Carry out this shard's part, unless some other shard does not know of a switch yet.

        It would treat the next push of a worker released here by the old policy.
        """
        for shard in range(1, self.ps.ps):
            peer = self.ps.peers.get("ps", shard)
            known = 0.0 if peer is None else peer.facts.get(ORDERS, 0.0)
            if known < self._switch_number:
                return
        orders = tuple(self._own)
        self._own.clear()
        self.ps.execution.carry_out(orders)

    def _tell_follower(self, shard: int, orders: Orders) -> None:
        peer = self.ps.peers.get("ps", shard)
        if peer is not None and not peer.gone:
            peer.contact.tell(orders)

    async def _keep_followers(self) -> None:
        """Send again what a follower did not get; forget what all of them have."""
        while True:
            await asyncio.sleep(self.ps.timing.heartbeat_s)
            for shard in range(1, self.ps.ps):
                peer = self.ps.peers.get("ps", shard)
                if peer is None:
                    continue
                got = int(peer.facts.get(ORDERS, 0))
                stuck = got == self._acknowledged.get(shard, -1)
                self._acknowledged[shard] = got
                missing = [order for number, order in self._unacknowledged if number > got]
                if stuck and missing:
                    log.info("ps %d: sending orders from %d on again", shard, got + 1)
                    self._tell_follower(shard, Orders(got + 1, tuple(missing)))
            everyone = min(self._acknowledged.values(), default=0)
            while self._unacknowledged and self._unacknowledged[0][0] <= everyone:
                self._unacknowledged.popleft()

    def _on_arrived(self, request: Request) -> None:
        peer = self.ps.peers.member(request)
        arrived = request.envelope.message
        if not isinstance(arrived, Arrived) or request.envelope.epoch != self.ps.epoch:
            return
        if self.coordinator is None:
            return
        member = self.coordinator.members.get(arrived.worker)
        if member is None or member.incarnation != arrived.incarnation:
            return
        self.advance(
            self.coordinator.arrived(
                arrived.worker, arrived.sequence, peer.name[1], finite=arrived.finite
            )
        )

    def _count_refusal(self) -> None:
        self.counts["refused"] += 1
        limit = self.ps.job.max_nonfinite
        if self.counts["refused"] > limit:
            self._fail(
                ExitCode.DIVERGED,
                f"{self.counts['refused']} gradients held NaN or infinity, the job allows {limit}: "
                "lower the learning rate, set clip_norm, or raise max_nonfinite",
            )

    def _fail(self, code: ExitCode, text: str) -> None:
        """The job cannot go on: the chief will end it with this text."""
        if self.failure:
            return
        log.error("%s", text)
        self.failure, self.failure_code = text, code
        if self.coordinator is not None:
            self.coordinator.steps = self.coordinator.version  # no further gradient is wanted
            self.advance(self.coordinator.settle())
        self.desk.notify()

    def _restored_ledger(self) -> tuple[Ledger, int]:
        checkpoint = self.ps.restored_from
        if checkpoint is None:
            return Ledger(), 0
        manifest = read_manifest(checkpoint)
        for option in ("batch_size", "seed"):
            then, now = manifest.fingerprint.get(option), self.ps.fingerprint[option]
            if then != now:
                log.warning("%s was %s, is %s: the data is gone through anew", option, then, now)
                return Ledger(), 0
        state = LedgerState.model_validate(manifest.ledger)
        return Ledger(state.next_batch, state.open_batches), state.examples

    def _show_policy(self) -> None:
        policy = make_policy(self.policy)
        bound = policy.staleness_bound
        self.ps.metrics.policy.info({"policy": self.policy})
        self.ps.metrics.staleness_bound_steps.set(float("inf") if bound is None else bound)
