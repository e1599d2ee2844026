"""The common base of ps, worker and chief: a job, its fingerprint, and an identity."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from zmqtrain.actors.actor import Actor, Request
from zmqtrain.actors.link import Link
from zmqtrain.actors.process_identity import process_name
from zmqtrain.compute.offload import in_daemon
from zmqtrain.config.cluster import Role, Task, connect_endpoint
from zmqtrain.config.task import TaskConfig
from zmqtrain.data.description import describe
from zmqtrain.errors import GroupOverError, ProtocolError, RefusedError
from zmqtrain.fingerprint import DATA
from zmqtrain.models.base import Dataset
from zmqtrain.observe.metrics import Metrics
from zmqtrain.planning.plan import Plan
from zmqtrain.transport.base import Transport
from zmqtrain.transport.keys import Owner
from zmqtrain.transport.registry import KnownPeer
from zmqtrain.wire.codec import Sender
from zmqtrain.wire.control import Gather, Shutdown

if TYPE_CHECKING:
    from zmqtrain.observe.traces import Traces


class JobActor(Actor):
    """The task of ``config`` in a cluster that trains a job by ``plan``."""

    def __init__(self, config: TaskConfig, plan: Plan, transport: Transport) -> None:
        metrics = Metrics(config.role, config.index)
        super().__init__(config.task, transport, metrics, config)
        self.plan, self.job = plan, plan.job
        self.job_name = config.job
        self.waits.hosts = {
            str(Task(Role.PS, shard)): str(Task(Role.WORKER, worker))
            for shard, worker in enumerate(plan.hosts)
        }
        self.lingers = not plan.group  # the next group begins anew
        self.lane = config.lane
        self.ps_endpoints = [connect_endpoint(address) for address in plan.ps]
        self.fingerprint = plan.fingerprint()
        self.process = process_name()
        self.end: Shutdown | None = None  # of the run, once the chief has sent it
        self.nonce = ""
        self.last_incarnation = 0  # of the life before
        self.known_generation = 0  # the highest in any welcome
        self._process_nonce = secrets.token_hex(8)
        self._lives = 0
        self._metrics_scheme = "http" if config.metrics_tls is None else "https"
        self.metrics_address = ""  # set once the metrics are served
        self.run_record: Callable[[], dict[str, Any]] | None = None  # for the page of the run
        self.traces: Traces | None = None  # of pushes, if it writes some

    async def load_data(
        self, given: tuple[Dataset, Dataset | None] | None = None
    ) -> tuple[Dataset, Dataset | None] | None:
        """Return the job's (training set, evaluation set); add the data to the fingerprint.

        ``given``: these sets, if they are loaded already. None: the task is stopped meanwhile.

        Raises:
            DataError, ConfigError: the data is not there, or does not fit the job.
        """

        def load() -> tuple[Dataset, Dataset | None]:
            data = given or self.job.load_data()
            self.fingerprint[DATA] = describe(data[0])
            return data

        loading = asyncio.ensure_future(in_daemon(load))
        stopped = asyncio.ensure_future(self.stopping.wait())
        try:
            await asyncio.wait([loading, stopped], return_when=asyncio.FIRST_COMPLETED)
            return loading.result() if loading.done() else None
        finally:
            loading.cancel()
            stopped.cancel()

    def link_all(self) -> list[Link]:
        return [
            self.link(Task(Role.PS, index), endpoint)
            for index, endpoint in enumerate(self.ps_endpoints)
        ]

    def begin_life(self) -> None:
        """Forget the incarnation; the next join gets a new one."""
        self.last_incarnation = max(self.incarnation, self.last_incarnation)
        self.incarnation = 0
        self._lives += 1
        self.nonce = f"{self._process_nonce}/{self._lives}"

    def owner_of(self, sender: Sender) -> Owner:
        return self.plan.owner_of(sender.role, sender.index)

    def on_stranger(self, request: Request, error: RefusedError) -> None:
        """Refuse it; send a ps or chief of an older group, on another worker, the current group."""
        peer = request.peer
        is_of_worker = type(peer) is KnownPeer and peer.key.owner.role == Role.WORKER
        if self.plan.group and is_of_worker and request.sender.role in (Role.PS, Role.CHIEF):
            request.send(Gather(self.plan.group, self.plan.members))
        else:
            super().on_stranger(request, error)

    def on_gather(self, request: Request, message: Gather) -> None:
        """Handle a worker that gives this group up, does not know it, or knows a later one."""
        group = self.plan.group
        if not group:
            raise ProtocolError(f"{self.task} is of no group of workers")
        carries = request.sender.index in self.plan.hosts  # the group needs it
        if message.group > group or (message.group == group and message.gives_up and carries):
            self.crash(GroupOverError(f"{request.sender}: group {group} of workers is over"))
        elif message.gives_up or message.group < group:
            request.send(Gather(self.plan.group, self.plan.members))
            for link in self.links:
                if link.endpoint is request.endpoint:  # it lost our requests with its group
                    link.ask_again()

    def tasks_with_metrics(self) -> Iterable[tuple[str, int, str]] | None:
        """Return role, index and metrics address of all tasks; None if they are not known here."""
        return None

    def targets(self) -> list[dict[str, Any]] | None:
        """Return the metrics addresses of all tasks, for Prometheus's HTTP discovery."""
        tasks = self.tasks_with_metrics()
        if tasks is None:
            return None
        return [
            {
                "targets": [address],
                "labels": {
                    "__scheme__": self._metrics_scheme,
                    "__meta_zmqtrain_job": self.job_name,
                    "__meta_zmqtrain_role": role,
                    "__meta_zmqtrain_index": str(index),
                },
            }
            for role, index, address in tasks
            if address
        ]

    @property
    def has_met(self) -> bool:
        """Whether this life has joined a job."""
        return self.incarnation > 0

    def ready(self, *, everyone: bool = False) -> tuple[bool, str]:
        """Return (whether the task is ready, its state in words).

        ``everyone``: only a task of a job that has begun is ready.
        """
        return True, "running"
