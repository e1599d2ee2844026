"""The leader's part of ps 0: it turns arrivals into orders for every shard.

The deciding itself is the coordinator's, which is pure; here are its clock, its messages and what
people want to know of the job.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from zmqtrain.actors.actor import Request
from zmqtrain.config.cluster import Role
from zmqtrain.coordination.admin_api import AdminApi
from zmqtrain.coordination.coordinator import Coordinator
from zmqtrain.coordination.delivery import OrderDelivery
from zmqtrain.coordination.events import (
    Event,
    GivenUp,
    Joined,
    Left,
    PullArrived,
    PushArrived,
    PushesReported,
)
from zmqtrain.coordination.ledger import Ledger, restored_ledger
from zmqtrain.coordination.membership import Peer
from zmqtrain.coordination.state import pack, unpack
from zmqtrain.coordination.statistics import Staleness, Throughput
from zmqtrain.coordination.status import divergence
from zmqtrain.errors import (
    ConfigError,
    ExitCode,
    FencedError,
    ProtocolError,
    ZmqTrainError,
)
from zmqtrain.observe.logs import StateLogger
from zmqtrain.optim import as_schedule
from zmqtrain.policies import make_policy
from zmqtrain.store import segment_layout
from zmqtrain.store.journal import Journal
from zmqtrain.store.manifest import read_manifest
from zmqtrain.wire.messages import Arrived, Order, Push, ShardFile, ShardReport

if TYPE_CHECKING:
    from zmqtrain.server.direction import Pending
    from zmqtrain.server.executor import Applied
    from zmqtrain.server.server import ParameterServer

log = logging.getLogger(__name__)


class Leader:
    """Direction of ps 0 and, by orders, of every other ps."""

    def __init__(self, ps: ParameterServer) -> None:
        self.ps = ps
        self.policy = ps.job.policy
        self.coordinator: Coordinator | None = None
        self.staleness = Staleness()
        self.throughput = Throughput()
        self.loss = float("nan")
        self.failure = ""
        self.failure_code = ExitCode.OK
        self._peopled_at = time.monotonic()  # when a worker was last live
        self.delivery = OrderDelivery(ps)
        self._journal = Journal(ps.shard.segment)
        self._states = StateLogger(log)
        rate = getattr(ps.job.optimizer, "learning_rate", None)
        self._learning_rate = None if rate is None else as_schedule(rate)
        metrics = ps.metrics
        metrics.global_step_target.set(ps.job.steps)
        metrics.expected_workers.set(ps.workers)
        self._show_policy()
        self.admin = AdminApi(self)
        ps.on(Arrived, self._on_arrived)
        ps.on(ShardReport, self._on_shard_report)
        if ps.shards > 1:
            ps.spawn(self.delivery.keep_others())

    @property
    def step(self) -> int:
        return self.coordinator.version if self.coordinator else 0

    # Direction

    @property
    def counts(self) -> dict[str, int]:
        """Pushes by what became of them."""
        made = self.coordinator
        names = ("applied", "dropped", "refused")
        return {name: getattr(made, name) if made is not None else 0 for name in names}

    @property
    def all_delivered(self) -> bool:
        """Whether what was decided has come to every shard that it can come to.

        Orders go to all of them. Under a policy that is not coordinated, a worker's push has come
        to all once the worker tells so.
        """
        if self.coordinator is None:
            return False
        told = self.coordinator.workers_by_state["stopped"]
        peers = [self.ps.peers.get("worker", worker) for worker in told]
        return self.delivery.is_done and all(peer and peer.finished for peer in peers)

    def generation_began(self) -> None:
        ps = self.ps
        self.delivery.begin(self.policy)
        self.admin.forget_saves()
        self.coordinator = Coordinator(
            make_policy(self.policy),
            shards=ps.shards,
            workers=ps.workers,
            steps=ps.job.steps,
            version=ps.shard.version,
            ledger=self._restored_ledger(),
            lookahead=ps.job.prefetch,
        )
        for peer in ps.peers.workers():
            self.coordinator.handle(Joined(peer.index, peer.incarnation))
        if self.policy != ps.job.policy:
            self.delivery.tell_others([Order("switch", text=self.policy)])
        self._begin_journal()

    def recovered(self) -> None:
        """Go on where a killed ps 0 was: decide anew what it decided, carry out what it did not."""
        state, *events = (unpack(entry) for entry in self._journal.read())
        self.coordinator = coordinator = state["coordinator"]
        self.policy = state["policy"]
        self.delivery.restore(state["delivery"])
        for event in events:
            orders = coordinator.handle(event)
            self._follow_switches(orders)
            self.delivery.give(orders, again=True)
        self.delivery.resume()
        self._begin_journal()
        self._reconcile(coordinator)

    def _reconcile(self, coordinator: Coordinator) -> None:
        """Let happen what the segment's marks tell and the journal had not been told."""
        live = {peer.index: peer for peer in self.ps.peers.workers()}
        for worker in [worker for worker in coordinator.members if worker not in live]:
            self.event(Left(worker))
        for worker, peer in live.items():
            member = coordinator.members.get(worker)
            if member is None or member.incarnation != peer.incarnation:
                self.event(Joined(worker, peer.incarnation))
        for worker, pending in tuple(self.ps.pending.items()):
            self.arrived(worker, pending)

    def switched(self, spec: str) -> None:
        """It was seen when the order was given."""

    def joined(self, peer: Peer) -> None:
        if peer.role == Role.PS:
            self.admin.give_up_saves(FencedError(f"{peer} has a new life"))
        if peer.is_worker:
            self.event(Joined(peer.index, peer.incarnation))

    def left(self, peer: Peer) -> None:
        if peer.is_worker:
            self.ps.metrics.worker_step.forget(peer.index)
            self.event(Left(peer.index))

    def check(self, worker: int, push: Push) -> None:
        if self.coordinator is not None and not self.coordinator.ledger.holds(worker, push.batch):
            raise ProtocolError(
                f"worker {worker} pushes batch {push.batch}, which it has no lease on"
            )

    def arrived(self, worker: int, pending: Pending) -> None:
        if not pending.sequence:
            self.event(PullArrived(worker))
            return
        self.loss = pending.loss
        self.ps.metrics.worker_step[worker].set(pending.sequence)
        sequence, batch, examples = pending.sequence, pending.batch, pending.examples
        self.event(PushArrived(worker, sequence, batch, examples, pending.finite))

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
        self.admin.written(directory, file)

    def not_written(self, directory: str, error: ZmqTrainError) -> None:
        self.admin.not_written(directory, error)

    def watch(self) -> None:
        """Give the job up if nobody works on it, or someone has waited for too long."""
        coordinator, now = self.coordinator, time.monotonic()
        limit_s = self.ps.timing.join_timeout_s
        if coordinator is None or coordinator.finished or coordinator.members:
            self._peopled_at = now
        if now - self._peopled_at > limit_s:
            self._fail(ExitCode.PEER_LOST, f"no worker has been alive for {limit_s:g} s")
        if coordinator is None:
            return
        waiting = list(coordinator.held())
        self.ps.metrics.waiting_workers.set(len(waiting))
        for held in waiting:
            pending = self.ps.pending.get(held.worker)
            if pending is None or now - pending.arrived_at <= limit_s:
                continue
            by = ", ".join(f"worker {index}" for index in held.by) or "a worker to join"
            text = f"worker {held.worker} has waited {limit_s:g} s for {by}: {held.reason}"
            if coordinator.is_alive(held.by):  # their steps take that long
                self._states.state(held.worker, text, logging.WARNING)
            else:
                self._fail(ExitCode.PEER_LOST, text)

    # Events and orders

    def event(self, event: Event) -> None:
        """Note an event for the next life, decide on it, and give the orders.

        After the end nothing is decided any more: what would count then is in no checkpoint.
        """
        if self.coordinator is None or self.ps.shutdown is not None:
            return
        entry = pack(event)
        if not self._journal.append(entry):
            self._begin_journal()
            self._journal.append(entry)
        orders = self.coordinator.handle(event)
        self._follow_switches(orders)
        self.delivery.give(orders)
        self._tell_watchers(self.coordinator)

    def _follow_switches(self, orders: Sequence[Order]) -> None:
        for order in orders:
            if order.kind == "switch":
                self.policy = order.text
                self.ps.metrics.policy_switches.inc()
                self._show_policy()

    def _tell_watchers(self, coordinator: Coordinator) -> None:
        if coordinator.finished:
            self.admin.closed()
        if coordinator.finished or self.failure:
            self.admin.notify()
        if coordinator.next_policy is None:
            self.admin.policy_settled(coordinator.policy)
        if text := divergence(coordinator.refused, self.ps.job.max_nonfinite):
            self._fail(ExitCode.DIVERGED, text)

    def _begin_journal(self) -> None:
        """Write down all that the next life has to know, in place of what was noted so far."""
        if self.coordinator is None:
            return
        state = {
            "coordinator": self.coordinator,
            "policy": self.policy,
            "delivery": self.delivery.state(),
        }
        try:
            kept = self._journal.begin(pack(state))
            reason = "" if kept else "it is too large"
        except TypeError as error:
            reason = str(error)
        if reason:
            log.warning("a killed ps 0 will go back to the last checkpoint: %s", reason)
            self.ps.shard.segment.words[segment_layout.GENERATION] = 0

    def _on_arrived(self, request: Request, arrived: Arrived) -> None:
        peer = self.ps.peers.member(request)
        if self.coordinator is None or request.envelope.generation != self.ps.generation:
            return
        self.delivery.answer(peer.index)
        pushes = tuple(push for push in arrived.pushes if self.coordinator.expects(push))
        if pushes:  # else all of them are reported once more
            self.event(PushesReported(peer.index, pushes))

    def _on_shard_report(self, request: Request, report: ShardReport) -> None:
        peer = self.ps.peers.member(request)
        if request.envelope.generation != self.ps.generation:
            return
        if report.orders > self.delivery.sent:
            raise ProtocolError(f"{peer} tells of order {report.orders}, of {self.delivery.sent}")
        peer.report = report
        self.delivery.carry_out_own()
        if report.failure:
            self._fail(ExitCode.USAGE, f"{peer} cannot update its parameters: {report.failure}")

    def _fail(self, code: ExitCode, text: str) -> None:
        """The job cannot go on: the chief will end it with this text."""
        if self.failure:
            return
        log.error("%s", text)
        self.failure, self.failure_code = text, code
        self.event(GivenUp())
        self.admin.notify()

    def _restored_ledger(self) -> Ledger:
        checkpoint = self.ps.restored_from
        if checkpoint is None:
            return Ledger()
        return restored_ledger(read_manifest(checkpoint), self.ps.fingerprint)

    def _show_policy(self) -> None:
        policy = make_policy(self.policy)
        bound = policy.staleness_bound
        self.ps.metrics.policy.info({"policy": self.policy})
        self.ps.metrics.staleness_bound_steps.set(float("inf") if bound is None else bound)
