"""One task of a job, from its start to its end, for one group of workers after another."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import TypeAlias

from zmqtrain.actors.task import JobActor
from zmqtrain.chief.chief import Chief
from zmqtrain.chief.progress import ProgressLog
from zmqtrain.config import run_file
from zmqtrain.config.cluster import Role, Task
from zmqtrain.config.restarts import supervised_since
from zmqtrain.config.task import ENVIRON, TaskConfig
from zmqtrain.errors import CheckpointError, ConfigError, ExitCode, PeerLostError, RefusedError
from zmqtrain.hosting.actors import OnProgress, actors_of, run_all
from zmqtrain.hosting.groups import Gatherer, claim, may_regroup, serve_groups
from zmqtrain.hosting.process import be_scraped, ignore_signals, serve_health, stop_on_signals
from zmqtrain.job import Job
from zmqtrain.planning.plan import Plan
from zmqtrain.server.server import ParameterServer
from zmqtrain.store.logdir import checkpoints, forget_groups, step_of
from zmqtrain.transport.by_address import TransportByAddress

CHECK_S = 1.0  # how often a task that meets no other checks whether the job has ended
NEW_JOB_SHARE = 0.1  # of the join timeout: how long a killed task waits for a new job to begin

IN_A_TASK: ContextVar[bool] = ContextVar("in_a_task", default=False)
"""Whether a task is running, and has called this code: its data set, its callback."""

OnStart: TypeAlias = Callable[[JobActor], None]
"""Called in the task's event loop with the actor that the process stops for."""

log = logging.getLogger(__name__)


def _publish(
    task: Task, config: TaskConfig, plan: Plan, stack: contextlib.ExitStack, metrics: str
) -> None:
    """Let `zmqtrain status` find the job by this task, if it is the chief or ps 0."""
    published = run_file.published(config.job, plan.ps, str(task), metrics)
    if task.role is Role.CHIEF:
        stack.enter_context(published)
    elif task == Task(Role.PS, 0) and not plan.is_of_one_run:
        try:
            stack.enter_context(published)
        except ConfigError as error:
            log.warning("zmqtrain status can find the job only by its chief: %s", error)


def _note_end(actors: Sequence[JobActor], plan: Plan) -> None:
    """Record on this host that the chief has ended the run, for tasks that start later."""
    if plan.is_of_one_run:  # no task of it starts later
        return
    for actor in actors:
        end = actor.summary if isinstance(actor, Chief) else getattr(actor, "end", None)
        if end is not None:
            with contextlib.suppress(ConfigError):  # then they wait until join_timeout_s
                run_file.note_end(plan.addresses, int(end.exit_code))


@contextlib.contextmanager
def _key_of_one_life(config: TaskConfig, plan: Plan) -> Iterator[None]:
    """Let a task that was refused be restarted if it has another key by now."""
    security = plan.security(config)
    secret = security.secret() if security.directory else b""
    try:
        yield
    except RefusedError:
        with contextlib.suppress(ConfigError):  # it was revoked, without another one
            if secret and security.secret() != secret:
                text = f"{config.task} has a new key, which counts from its next start"
                raise PeerLostError(text) from None
        raise


@contextlib.contextmanager
def _life(config: TaskConfig, plan: Plan) -> Iterator[float | None]:
    """Yield when the first life of this task began, if it was killed or lost its peers.

    The first life of a task that begins a job removes the note that another one at its addresses
    has ended.
    """
    if plan.is_of_one_run:  # no task of it starts later
        yield None
        return
    with run_file.life(plan.addresses, config.task) as since:
        is_first = since is None and math.isinf(supervised_since(ENVIRON))
        task = config.task
        if is_first and (plan.shard_of(task) is not None or plan.hosts_chief(task)):
            run_file.forget_end(plan.addresses)
        yield since


def _is_done(job: Job) -> bool:
    """Return whether there is a checkpoint of the job's last step."""
    if job.logdir is None:
        return False
    with contextlib.suppress(CheckpointError):
        return any(step_of(path) >= job.steps for path in checkpoints(Path(job.logdir))[:1])
    return False


async def _leave_with_the_job(
    actors: Sequence[JobActor], config: TaskConfig, plan: Plan, since: float | None
) -> None:
    """Stop a task that meets no other, with the actors that it hosts, if its job has ended.

    Then this host has a note of that after ``since``, or a worker finds the last checkpoint.

    After a killed life, another job may begin at the same addresses, and gets some time to do so.
    Under a supervisor it is known which lives belong to one job.
    """
    last, until = actors[-1], time.monotonic() + NEW_JOB_SHARE * config.join_timeout_s
    if math.isfinite(supervised := supervised_since(ENVIRON)):
        since, until = supervised, 0.0
    # To an engine, a worker's end is not the job's. A later group has begun, and ends with its job.
    is_free = config.role is Role.WORKER and plan.shard_of(config.task) is None
    may_leave = is_free and (config.on_term == "leave" or plan.group > 1)
    while not last.has_met:
        code = None
        if since is not None and time.monotonic() >= until:
            code = run_file.end_since(plan.addresses, since)
        if code is None and may_leave and await asyncio.to_thread(_is_done, last.job):
            code = ExitCode.OK
        if code is not None:
            log.info("the job has ended meanwhile")
            for actor in actors:
                actor.stop(code)
            return
        await asyncio.sleep(CHECK_S)


async def serve(
    config: TaskConfig,
    plan: Plan,
    on_start: OnStart = stop_on_signals,
    *,
    actors: list[JobActor] | None = None,
    on_progress: OnProgress | None = None,
) -> int:
    """Run the task, for one group of workers after another if it can; return its exit code.

    ``actors``: a list that gets its actors. ``on_progress``: called by the chief; it logs unless
    this is given.
    """
    IN_A_TASK.set(True)
    actors = [] if actors is None else actors
    show, since = on_progress or ProgressLog(), None

    async def serve_group(in_group: Plan, actors: list[JobActor]) -> int:
        return await _serve_group(config, in_group, on_start, actors, show, since)

    async def gather(gatherer: Gatherer) -> int:
        with contextlib.ExitStack() as stack:
            stack.callback(gatherer.transport.close)
            serve_health(gatherer, config, stack)
            on_start(gatherer)
            return await gatherer.run()

    def transport(of_all: Plan) -> TransportByAddress:
        return TransportByAddress(of_all.security(config))

    try:
        with _key_of_one_life(config, plan), _life(config, plan) as since:
            if may_regroup(config, plan):
                return await serve_groups(config, plan, serve_group, actors, gather, transport)
            return await serve_group(plan, actors)
    finally:
        ignore_signals()


async def _serve_group(
    config: TaskConfig,
    plan: Plan,
    on_start: OnStart,
    actors: list[JobActor],
    on_progress: OnProgress,
    since: float | None,
) -> int:
    """Run the actors of the task, and show the summary if one is the chief."""
    actors += actors_of(config, plan, TransportByAddress, on_progress)
    actors[-1].add_background_task(partial(_leave_with_the_job, actors, config, plan, since))
    with contextlib.ExitStack() as stack:
        servers = []
        for actor in actors:
            stack.callback(actor.transport.close)
            servers.append(serve_health(actor, config, stack))
        _publish(actors[0].task, config, plan, stack, actors[0].metrics_address)
        on_start(actors[0])
        if isinstance(actors[0], Chief):
            await claim(stack, actors[0])
            if actors[0].stopping.is_set():
                return actors[0].stop_code
        try:
            # zmqtrain run ends with the first mistake of a worker, and needs to see it.
            holds_shard = plan.shard_of(config.task) is not None
            results = await run_all(actors, serve_on=holds_shard and not plan.is_of_one_run)
        finally:
            _note_end(actors, plan)
        for actor, server in zip(actors, servers, strict=True):
            if isinstance(actor, ParameterServer) and actor.leader is not None and actor.end:
                await be_scraped(server, actors)
        logdir = plan.job.logdir
        if plan.group and logdir and getattr(actors[0], "summary", None) is not None:
            forget_groups(logdir)
    chief = actors[0]
    if isinstance(chief, Chief) and chief.summary is not None:
        lines = ["", *chief.summary.lines()]
        if config.log_format == "json":  # a collector of logs reads both streams
            lines = [chief.summary.json()]
        sys.stdout.write("\n".join([*lines, ""]))
        sys.stdout.flush()
    return results[0]
