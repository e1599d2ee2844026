"""Figures of a running job: metrics, and the progress of each worker."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zmqtrain.config.cluster import Role
from zmqtrain.coordination import waiting
from zmqtrain.coordination.coordinator import Coordinator
from zmqtrain.coordination.events import Event, PushArrived, PushesReported
from zmqtrain.coordination.peers import PeerTable
from zmqtrain.coordination.statistics import Staleness, Throughput
from zmqtrain.job import Job
from zmqtrain.observe.metrics import Metrics
from zmqtrain.optim.schedules import rate_at
from zmqtrain.policies import make_policy
from zmqtrain.policies.base import TokenQueue
from zmqtrain.protocol.orders import Answer, Order
from zmqtrain.protocol.status import Moves, agreement_of


@dataclass(slots=True)
class PassFigures:
    """The fields of a :class:`Status` that epochs need; they are of this pass over the data."""

    step: int
    uncounted: int
    limit: int | None
    pass_loss: float
    pass_examples: int
    pass_sums: dict[str, float]
    pass_weight: float
    learning_rate: float | None

    @classmethod
    def of(cls, coordinator: Coordinator) -> PassFigures:
        ledger = coordinator.ledger
        return cls(
            step=coordinator.version,
            uncounted=ledger.uncounted,
            limit=ledger.limit,
            pass_loss=ledger.mean_loss,
            pass_examples=ledger.pass_examples,
            pass_sums=ledger.pass_sums,
            pass_weight=ledger.pass_weight,
            learning_rate=coordinator.learning_rate,
        )


class JobFigures:
    """The figures of a leader's job; no decision depends on them."""

    def __init__(self, job: Job, peers: PeerTable, metrics: Metrics) -> None:
        self.staleness = Staleness()
        self.throughput = Throughput()
        self._peers = peers
        self._metrics = metrics
        self._losses: dict[int, float] = {}  # of each worker's last push
        self._taken = 0  # tokens at the last update
        self.rounds = 0  # of local steps
        self._moves = Moves()  # of the host's shard in the last one
        self._learning_rate = getattr(job.optimizer, "learning_rate", None)

    @property
    def loss(self) -> float:
        """The mean of the workers' last losses, which no order of arrival changes."""
        return sum(self._losses.values()) / len(self._losses) if self._losses else math.nan

    def stepped(self, coordinator: Coordinator, more: int, losses: Mapping[int, float]) -> None:
        """Note further steps of a roster; ``losses``: each worker's last one."""
        gradients = more * len(losses)
        self.throughput.observe(coordinator.version, time.monotonic())
        for worker in losses:
            self._observe_staleness(worker, 0, more)
        self._metrics.staleness_versions.observe(0, times=gradients)
        self._metrics.pushes.applied.inc(gradients)
        self._metrics.parameter_version.set(coordinator.version)
        for worker, loss in losses.items():
            self.show_worker(coordinator, worker, coordinator.members[worker].sequence, loss)
        self._show_step(coordinator, coordinator.version)

    def applied(
        self, coordinator: Coordinator, version: int, staleness: Mapping[int, int], at: float
    ) -> None:
        """Note an update of the host's shard, from gradients that are stale by these versions."""
        self.throughput.observe(version, at)
        for worker, versions in staleness.items():
            self._observe_staleness(worker, versions)
        self._show_step(coordinator, version)

    def count_round(self, moves: Moves | None) -> None:
        """Count a round of local steps by the moves of the host's shard; None: it was none."""
        if moves is not None:
            self.rounds, self._moves = self.rounds + 1, moves
            self._metrics.rounds.set(self.rounds)
            self._metrics.round_agreement.set(self.agreement)

    @property
    def agreement(self) -> float:
        """Agreement of the workers' moves in the last round, on all shards that have reported."""
        reports = [peer.report for peer in self._peers if peer.report is not None]
        return agreement_of((self._moves, *(report.moves for report in reports)))

    def _observe_staleness(self, worker: int, versions: int, gradients: int = 1) -> None:
        self.staleness.observe(versions, gradients)
        if (peer := self._peers.get(Role.WORKER, worker)) is not None:
            peer.staleness.observe(versions, gradients)

    def count_waits(
        self, event: Event, orders: Sequence[Order], waiting_since: Mapping[int, float], now: float
    ) -> None:
        """Charge the waits that these orders end to the worker whose push came last."""
        if isinstance(event, PushArrived):
            last = event.worker
        elif isinstance(event, PushesReported) and event.arrived.workers:
            last = event.arrived.workers[-1]
        else:
            return
        for order in orders:
            if isinstance(order, Answer) and order.sequence and order.worker != last:
                waited_s = now - waiting_since.get(order.worker, now)
                self._metrics.waited_for_seconds[last].inc(waited_s)

    def show_worker(
        self, coordinator: Coordinator, worker: int, sequence: int, loss: float
    ) -> None:
        """Show a worker's progress after the push with this number."""
        present = {peer.index for peer in self._peers.workers()} | {worker}
        self._losses[worker] = loss
        self._losses = {w: self._losses[w] for w in sorted(self._losses) if w in present}
        member = coordinator.members.get(worker)
        step = sequence + (member.unpushed if member is not None else 0)
        peer = self._peers.get(Role.WORKER, worker)
        if peer is not None:
            step += peer.joined_at
            peer.pushes, peer.loss = step, loss
        self._metrics.worker_step[worker].set(step)

    def level_steps(self) -> None:
        """Show all workers at the step of the first one."""
        workers = list(self._peers.workers())
        most = max((peer.pushes for peer in workers), default=0)
        for peer in workers:
            peer.joined_at += most - peer.pushes
            peer.pushes = most

    def _show_step(self, coordinator: Coordinator, version: int) -> None:
        self._metrics.global_step.set(version)
        self._metrics.rosters.set(coordinator.rosters)
        if self._learning_rate is not None:
            set_by_callback = coordinator.learning_rate
            own = rate_at(self._learning_rate, version - 1)
            self._metrics.learning_rate.set(own if set_by_callback is None else set_by_callback)

    def show_policy_state(self, coordinator: Coordinator) -> None:
        """Show the steps that workers are behind, and the tokens of a policy that has some."""
        metrics, policy = self._metrics, coordinator.policy
        behind = waiting.behind(coordinator)
        for worker in metrics.worker_behind_steps.keys() - behind.keys():
            metrics.worker_behind_steps.forget(worker)
        for worker, steps in behind.items():
            metrics.worker_behind_steps[worker].set(steps)
        queue = policy if isinstance(policy, TokenQueue) else None
        metrics.tokens_queued.set(math.nan if queue is None else len(queue.tokens))
        metrics.token_takers.set(math.nan if queue is None else len(queue.takers))
        taken = 0 if queue is None else queue.taken
        metrics.tokens_taken.inc(taken - self._taken if taken >= self._taken else taken)
        self._taken = taken

    def show_policy(self, spec: str) -> None:
        bound = make_policy(spec).staleness_bound
        self._metrics.policy.info({"policy": spec})
        self._metrics.staleness_bound_steps.set(math.inf if bound is None else bound)
