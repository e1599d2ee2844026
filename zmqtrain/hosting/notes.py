"""Notes on this host about a job: which task serves it, and how it has ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from zmqtrain.actors.task import JobActor
from zmqtrain.chief.chief import Chief
from zmqtrain.config import run_file
from zmqtrain.config.cluster import Role, Task
from zmqtrain.config.restarts import supervised_since
from zmqtrain.config.task import ENVIRON, TaskConfig
from zmqtrain.errors import CheckpointError, ConfigError, ExitCode
from zmqtrain.job import Job
from zmqtrain.planning.plan import Plan
from zmqtrain.store.logdir import checkpoints, step_of

CHECK_S = 1.0  # how often a task that meets no other checks whether the job has ended
NEW_JOB_SHARE = 0.1  # of the join timeout: how long a killed task waits for a new job to begin

log = logging.getLogger(__name__)


def publish(
    task: Task, config: TaskConfig, plan: Plan, stack: contextlib.ExitStack, metrics: str
) -> None:
    """Let `zmqtrain status` find the job by this task, if it is the chief or ps 0."""
    published = run_file.published(config.job, plan.ps, str(task), metrics, plan.job.logdir)
    if task.role is Role.CHIEF:
        stack.enter_context(published)
    elif task == Task(Role.PS, 0) and not plan.is_of_one_run:
        try:
            stack.enter_context(published)
        except ConfigError as error:
            log.warning("zmqtrain status can find the job only by its chief: %s", error)


def note_end(actors: Sequence[JobActor], plan: Plan) -> None:
    """Record on this host that the chief has ended the run, for tasks that start later."""
    if plan.is_of_one_run:  # no task of it starts later
        return
    for actor in actors:
        end = actor.summary if isinstance(actor, Chief) else actor.end
        if end is not None:
            with contextlib.suppress(ConfigError):  # then they wait until join_timeout_s
                run_file.note_end(plan.addresses, int(end.exit_code))


@contextlib.contextmanager
def life(config: TaskConfig, plan: Plan) -> Iterator[float | None]:
    """Yield when the first life of this task began, if it was killed or lost its peers.

    The first life of a task that begins a job removes the note of an earlier job's end there.
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


async def leave_with_the_job(
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
