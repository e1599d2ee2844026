"""Ends a job that has no worker, or waits for one that does not come."""

from __future__ import annotations

import logging
import time

from zmqtrain.coordination import waiting
from zmqtrain.coordination.leader import Leader
from zmqtrain.coordination.peers import A_WORKER, names_of
from zmqtrain.errors import ExitCode
from zmqtrain.observe.logs import StateLogger

log = logging.getLogger(__name__)


class WorkerWatch:
    """Watches the workers of a leader's job, and shows how many are expected, wait and lag."""

    def __init__(self, leader: Leader) -> None:
        self._leader = leader
        self._states = StateLogger(log)

    def check(self) -> None:
        """Fail the job if no worker is alive, or one has waited for too long."""
        leader, now = self._leader, time.monotonic()
        coordinator, limit_s = leader.coordinator, leader.timing.join_timeout_s
        if not leader.has_begun or coordinator.finished or coordinator.members:
            leader.peopled_at = now
        if now - leader.peopled_at > limit_s:
            leader.fail(ExitCode.PEER_LOST, f"no worker has been alive for {limit_s:g} s")
        held = list(waiting.held(coordinator))
        leader.metrics.expected_workers.set(self._expected())
        leader.metrics.waiting_workers.set(len(held))
        leader.figures.show_policy_state(coordinator)
        for each in held:
            if now - leader.waiting_since.get(each.worker, now) <= limit_s:
                continue
            by = names_of(each.by) or A_WORKER
            text = f"worker {each.worker} has waited {limit_s:g} s for {by}: {each.reason}"
            if waiting.is_alive(coordinator, each.by):  # their steps may take that long
                self._states.state(each.worker, text, logging.WARNING)
            else:
                leader.fail(ExitCode.PEER_LOST, f"{text}; start it, or raise --join-timeout-s")

    def _expected(self) -> int:
        """Return the number of workers that should be here: all but those that have left."""
        workers = [peer for peer in self._leader.peers if peer.is_worker]
        here = {*range(self._leader.plan.workers), *(peer.index for peer in workers)}
        return len(here.difference(peer.index for peer in workers if peer.left))
