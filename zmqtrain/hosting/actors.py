"""The actors of a process: made from a plan, and run together to their end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TypeAlias

from zmqtrain.actors.task import JobActor
from zmqtrain.chief.chief import Chief
from zmqtrain.config.cluster import Role, Task
from zmqtrain.config.task import TaskConfig
from zmqtrain.errors import RETRYABLE, ZmqTrainError
from zmqtrain.exchanges.worker import Worker
from zmqtrain.models.base import Dataset
from zmqtrain.planning.plan import Plan
from zmqtrain.protocol.status import Status
from zmqtrain.server.server import ParameterServer
from zmqtrain.transport.base import Transport
from zmqtrain.transport.security import Security

OnProgress: TypeAlias = Callable[[Status], None]
"""Called by the chief with the job's status."""

log = logging.getLogger(__name__)


def actors_of(
    config: TaskConfig,
    plan: Plan,
    transport_for: Callable[[Security], Transport],
    on_progress: OnProgress,
    data: tuple[Dataset, Dataset | None] | None = None,
) -> list[JobActor]:
    """Return the actors of a task: the chief and the shard that it hosts, if any, then its own.

    ``transport_for``: makes a transport for one key; the chief may have another than its host.
    ``data``: training set and evaluation set, loaded from the job's data unless given.
    """
    actors: list[JobActor] = []
    if plan.hosts_chief(config.task):
        own = plan if config.role is Role.CHIEF else plan.with_own_model()
        chief = config.of(Task(Role.CHIEF, 0))
        transport = transport_for(own.security(chief))
        actors.append(Chief(chief, own, transport, on_progress, data))
    if config.role is Role.CHIEF:
        return actors
    transport = transport_for(plan.security(config))
    if (shard := plan.shard_of(config.task)) is not None:
        actors.append(ParameterServer(config.of(Task(Role.PS, shard)), plan, transport))
    if config.role is Role.WORKER:
        actors.append(Worker(config, plan, transport, data))
    return actors


def chief_among(actors: Sequence[JobActor]) -> Chief:
    return next(actor for actor in actors if isinstance(actor, Chief))


async def run_all(actors: Sequence[JobActor], *, serve_on: bool = False) -> list[int]:
    """Run all actors; an error of one ends the others, which know it by then.

    When the first one has ended, the others are stopped. With ``serve_on`` an error of the last
    one, a worker that has joined, is raised when the others have ended, unless a restart may mend
    it: the job needs the part of the parameters that they hold.
    """
    *hosts, last = actors
    tasks = [asyncio.ensure_future(actor.run()) for actor in hosts]
    tasks.append(asyncio.ensure_future(_run_beside(tasks[:], last) if serve_on else last.run()))

    def stop_others(ended: asyncio.Task[int]) -> None:
        if not ended.cancelled() and ended.exception() is None:
            for actor in actors[1:]:
                actor.stop(ended.result())

    tasks[0].add_done_callback(stop_others)
    try:
        return list(await asyncio.gather(*tasks))
    except ZmqTrainError as error:
        left = [(actor, task) for actor, task in zip(actors, tasks, strict=True) if not task.done()]
        for actor, _ in left:
            actor.crash(error)
        if left:
            await asyncio.wait([task for _, task in left])
        for actor, task in zip(actors, tasks, strict=True):
            other = None if task.cancelled() else task.exception()
            if not isinstance(other, ZmqTrainError | None):  # a bug that gather passes over
                log.error("%s failed, too: %s", actor.task, other, exc_info=other)
        raise
    finally:
        for task in tasks:
            task.cancel()


async def _run_beside(hosts: Sequence[asyncio.Future[int]], worker: JobActor) -> int:
    try:
        return await worker.run()
    except ZmqTrainError as error:
        if hosts and worker.ready()[0] and error.exit_code < RETRYABLE:
            log.error("%s; the job goes on without %s, and needs its ps", error, worker.task)
            await asyncio.wait(hosts)
        raise
