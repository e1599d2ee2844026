"""What ps, worker and chief have in common: a job, its fingerprint, and facts about themselves."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace

from zmqtrain.actors.actor import Actor
from zmqtrain.cluster import Task
from zmqtrain.job import Job
from zmqtrain.metrics import Metrics
from zmqtrain.roles.joining import process_name
from zmqtrain.timing import Timing
from zmqtrain.transport.base import Transport
from zmqtrain.wire.messages import Heartbeat


class JobActor(Actor):
    """A task of a cluster with ``ps`` parameter servers that runs ``job``."""

    def __init__(
        self,
        task: Task,
        transport: Transport,
        metrics: Metrics,
        timing: Timing,
        job: Job,
        ps: int,
    ) -> None:
        super().__init__(task, transport, metrics, timing)
        self.job = job
        self.ps = ps
        self.fingerprint = job.fingerprint(ps)
        self.process = process_name()
        self.nonce = ""
        self._process_nonce = secrets.token_hex(8)
        self._lives = 0
        self.metrics_address = ""  # set once the metrics are served
        self.report: Callable[[], dict[str, float]] = dict  # facts for the heartbeats

    def begin_life(self) -> None:
        """Forget the incarnation; the next join gets a new one."""
        self.incarnation = 0
        self._lives += 1
        self.nonce = f"{self._process_nonce}/{self._lives}"

    def ready(self) -> tuple[bool, str]:
        """Say whether the task does its part, and if not, why."""
        return True, "running"

    def heartbeat(self) -> Heartbeat:
        return replace(super().heartbeat(), facts=self.report())
