"""Start a task from its command line: what `python -m zmqtrain.roles.<role>` does."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

import click
import uvloop

from zmqtrain.actors.task import JobActor
from zmqtrain.chief.chief import Chief
from zmqtrain.chief.progress import ProgressLog
from zmqtrain.compute.threads import limit_threads
from zmqtrain.config import run_file
from zmqtrain.config.cluster import IPC, Role, Task
from zmqtrain.config.invoke import invoke
from zmqtrain.config.job_file import load_job
from zmqtrain.config.options import mistyped, options_of, values_of
from zmqtrain.config.restarts import supervised_since
from zmqtrain.config.task import ENVIRON, ROLE, TaskConfig, load_task, role_of_process
from zmqtrain.errors import (
    CheckpointError,
    ConfigError,
    ExitCode,
    PeerLostError,
    RefusedError,
    ZmqTrainError,
    host_error,
)
from zmqtrain.exchanges.worker import Worker
from zmqtrain.job import Job
from zmqtrain.observe.logs import setup_logging
from zmqtrain.protocol.status import Status
from zmqtrain.roles import script
from zmqtrain.roles.hosting import (
    allow_descriptors,
    be_scraped,
    check_own_address,
    ignore_signals,
    run_all,
    serve_health,
    stop_on_signals,
)
from zmqtrain.roles.regroup import Gatherer, claim, may_regroup, serve_groups
from zmqtrain.server.server import ParameterServer
from zmqtrain.store.logdir import checkpoints, forget_groups, step_of
from zmqtrain.training.own_loop import Meeting
from zmqtrain.transport.by_address import TransportByAddress

CHECK_S = 1.0  # how often a task that meets no other checks whether the job has ended
NEW_JOB_SHARE = 0.1  # of the join timeout: how long a killed task waits for a new job to begin

IN_A_TASK: ContextVar[bool] = ContextVar("in_a_task", default=False)
"""Whether a task is running, and has called this code: its data set, its callback."""

OnProgress = Callable[[Status], None]

log = logging.getLogger(__name__)

_HELP = {
    None: """Do what --role, ZMQTRAIN_ROLE, TF_CONFIG or honcho says.

    The index may come from an engine: JOB_COMPLETION_INDEX, or Slurm's variables.

    \b
    Examples:
      python -m zmqtrain.roles.task --role worker --job job.py --ps a:2222,b:2222 --workers 4
    """,
    Role.PS: """Keep a shard of the parameters and apply updates to it.

    \b
    Examples:
      python -m zmqtrain.roles.ps --job examples/digits.py --workers 2
      python -m zmqtrain.roles.ps --job job.py --ps a:2222,b:2222 --index 1 --workers 4
    """,
    Role.WORKER: """Compute gradients and push them.

    \b
    Examples:
      python -m zmqtrain.roles.worker --job examples/digits.py --index 1 --workers 2
      python -m zmqtrain.roles.worker --job job.py --ps a:2222,b:2222 --index 3 --workers 4
      python -m zmqtrain.roles.worker --job job.py --ps 0 --workers a:2222,b:2222 --index 1
    """,
    Role.CHIEF: """Begin the job, watch it, evaluate, save, end it, and print its summary.

    \b
    Examples:
      python -m zmqtrain.roles.chief --job examples/digits.py --workers 2
    """,
}


def launch(role: Role | None, arguments: Sequence[str] | None = None) -> int:
    """Run one task from flags, variables and TF_CONFIG; return the process's exit code.

    ``role``: None for the one that --role, ZMQTRAIN_ROLE or TF_CONFIG names.
    """
    with contextlib.suppress(OSError, RuntimeError, AttributeError):  # stderr may be closed
        faulthandler.enable()  # shows where a model's compiled code crashed
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if os.getpid() == 1:  # of a container: the kernel would keep SIGTERM from it
        signal.signal(signal.SIGTERM, lambda *_: os._exit(ExitCode.TERMINATED))
    return invoke(_command(role), f"python -m zmqtrain.roles.{role or 'task'}", arguments)


def _command(of: Role | None) -> click.Command:
    @click.command(str(of or "task"), help=_HELP[of], context_settings={"max_content_width": 100})
    @options_of(TaskConfig)
    @options_of(Job, optional=True)
    def run(role: str | None = None, **flags: Any) -> int:
        named = of or (Role(role) if role else role_of_process()[0])
        if named is None:
            raise ConfigError(
                f"the role of this task is not given; expected {', '.join(Role)}; give --role (or "
                f"{ROLE}), or TF_CONFIG with a task section"
            )
        with contextlib.suppress(OSError):  # Linux only: the name in top and pgrep
            Path("/proc/self/comm").write_text(f"zmqtrain {named}")
        config = load_task(named, flags)
        setup_logging(str(config.task), config.log_level, config.log_format)
        if not any(ps.startswith(IPC) for ps in config.ps):  # zmqtrain run has said it
            for text in mistyped(ENVIRON, TaskConfig, Job):
                log.warning("%s", text)
        overrides = values_of(Job, flags)
        if "strategy" in overrides:  # what contradicts it is told before what it needs of the job
            config.under(overrides["strategy"])
        job = load_job(config.job, **overrides)
        config = planned(config, job)
        if config.threads is not None:
            limit_threads(config.threads)
        if config.role is Role.WORKER and job.own_loop:
            task = script.ScriptTask(str(config.task), job, overrides, partial(_serve_loop, config))
            return run_process(config, partial(script.run, task, config.job))
        return run_process(config, lambda: uvloop.run(serve(config, job)))

    if of is None:
        kinds = click.Choice([str(role) for role in Role])
        run.params.insert(0, click.Option(["--role"], type=kinds, help="what this task does"))
    return run


def _serve_loop(config: TaskConfig, job: Job, on_start: script.OnStart) -> int:
    return uvloop.run(serve(config, job, on_start))


def planned(config: TaskConfig, job: Job) -> TaskConfig:
    """Return the configuration of a task under the job's strategy."""
    found = config.under(job.strategy, job)
    found = found.with_shards(job.shards_on(found.workers))
    if found.task != config.task:
        setup_logging(str(found.task), config.log_level, config.log_format)
        log.info("%s of TF_CONFIG is %s here: the chief computes, too", config.task, found.task)
    return found


def run_process(config: TaskConfig, run: Callable[[], int]) -> int:
    """Run a task until its end; log errors, return the exit code."""
    try:
        peers = len(config.ps) + (config.most_workers if config.as_ps else 0)
        allow_descriptors(peers)
        check_own_address(config)
        return run()
    except ZmqTrainError as error:
        log.debug("ended by", exc_info=True)
        log.error("%s", error)
        return error.exit_code
    except Exception as error:
        if mistake := host_error(error):
            log.debug("ended by", exc_info=True)
            log.error("%s", mistake)
            return mistake.exit_code
        log.exception("this is a bug in zmqtrain or in a plug-in")
        return ExitCode.CRASH


def run_task(
    config: TaskConfig,
    job: Job,
    on_start: script.OnStart = stop_on_signals,
    *,
    actors: list[JobActor] | None = None,
    on_progress: OnProgress | None = None,
) -> int:
    """Run a task of this job to its end, see :func:`serve`; log errors, return the exit code."""

    def run() -> int:
        found = planned(config, job)
        return uvloop.run(serve(found, job, on_start, actors=actors, on_progress=on_progress))

    return run_process(config, run)


def _publish(
    task: Task, config: TaskConfig, stack: contextlib.ExitStack, metrics: str = ""
) -> None:
    """Let `zmqtrain status` find the job by this task, if it is the chief or ps 0."""
    published = run_file.published(config.job, config.ps, str(task), metrics)
    if task.role is Role.CHIEF:
        stack.enter_context(published)
    elif task == Task(Role.PS, 0) and not config.ps[0].startswith(IPC):  # not in zmqtrain run
        try:
            stack.enter_context(published)
        except ConfigError as error:
            log.warning("zmqtrain status can find the job only by its chief: %s", error)


def _note_end(actors: Sequence[JobActor], config: TaskConfig) -> None:
    """Record on this host that the chief has ended the run, for tasks that start later."""
    if config.ps[0].startswith(IPC):  # in zmqtrain run no task starts later
        return
    for actor in actors:
        end = actor.summary if isinstance(actor, Chief) else getattr(actor, "end", None)
        if end is not None:
            with contextlib.suppress(ConfigError):  # then they wait until join_timeout_s
                run_file.note_end(config.addresses, int(end.exit_code))


@contextlib.contextmanager
def _key_of_one_life(config: TaskConfig) -> Iterator[None]:
    """Say that a task that was refused may be started again if it has another key meanwhile."""
    security = config.security
    secret = security.secret() if security.directory else b""
    try:
        yield
    except RefusedError:
        with contextlib.suppress(ConfigError):  # it was revoked, and there is no other one
            if secret and security.secret() != secret:
                text = f"{config.task} has a new key, which counts from its next start"
                raise PeerLostError(text) from None
        raise


@contextlib.contextmanager
def _life(config: TaskConfig) -> Iterator[float | None]:
    """Yield since when this process is its task, if a life of it was killed or lost its peers.

    What begins a job, and was not there before, makes the end of another one at its addresses void.
    """
    if config.ps[0].startswith(IPC):  # in zmqtrain run no task starts later
        yield None
        return
    with run_file.life(config.addresses, config.task) as since:
        is_first = since is None and math.isinf(supervised_since(ENVIRON))
        if is_first and (config.as_ps is not None or config.hosts_chief):
            run_file.forget_end(config.addresses)
        yield since


def _is_done(job: Job) -> bool:
    """Say whether there is a checkpoint of the job's last step."""
    if job.logdir is None:
        return False
    with contextlib.suppress(CheckpointError):
        return any(step_of(path) >= job.steps for path in checkpoints(Path(job.logdir))[:1])
    return False


async def _leave_with_the_job(
    actors: Sequence[JobActor], config: TaskConfig, since: float | None
) -> None:
    """Stop a task that meets no other, and what it hosts, if its job has ended: if that was noted
    on this host after ``since``, or a worker finds the last checkpoint in the logdir.

    A life that was killed may also be followed by another job at the same addresses, which is
    given some time to begin. Of lives under a supervisor it is known which belong together.
    """
    last, until = actors[-1], time.monotonic() + NEW_JOB_SHARE * config.join_timeout_s
    if math.isfinite(supervised := supervised_since(ENVIRON)):
        since, until = supervised, 0.0
    # To an engine, a worker's end is not the job's. A later group has begun, and ends with its job.
    is_free = config.role is Role.WORKER and config.as_ps is None
    may_leave = is_free and (config.on_term == "leave" or config.group > 1)
    while not last.has_met:
        code = None
        if since is not None and time.monotonic() >= until:
            code = run_file.end_since(config.addresses, since)
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
    job: Job,
    on_start: script.OnStart = stop_on_signals,
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
    job = job.hosted(config.hosted)

    show, since = on_progress or ProgressLog(), None

    async def serve_group(in_group: TaskConfig, actors: list[JobActor]) -> int:
        return await _serve_group(in_group, job, on_start, actors, show, since)

    async def gather(gatherer: Gatherer) -> int:
        with contextlib.ExitStack() as stack:
            stack.callback(gatherer.transport.close)
            serve_health(gatherer, config, stack)
            on_start(gatherer)
            return await gatherer.run()

    def transport(of_all: TaskConfig) -> TransportByAddress:
        return TransportByAddress(of_all.security)

    try:
        with _key_of_one_life(config), _life(config) as since:
            if may_regroup(config, job):
                return await serve_groups(config, job, serve_group, actors, gather, transport)
            return await serve_group(config, actors)
    finally:
        ignore_signals()


async def _serve_group(
    config: TaskConfig,
    job: Job,
    on_start: script.OnStart,
    actors: list[JobActor],
    on_progress: OnProgress,
    since: float | None,
) -> int:
    """Run the task's actor, and those of the chief and the ps that it hosts."""
    if config.hosts_chief:
        own = job if isinstance(job.model, Meeting) else job.with_own_model()
        as_chief = config.model_copy(update={"role": Role.CHIEF, "index": 0})
        # The chief may have a key of its own, so a transport of its own.
        actors.append(Chief(as_chief, own, TransportByAddress(as_chief.security), on_progress))
    transport = TransportByAddress(config.security)
    if config.as_ps is not None:
        actors.append(ParameterServer(config.as_ps, job, transport))
    if config.role is Role.WORKER:
        worker = Worker(config, job, transport)
        actors.append(worker)
    actors[-1].add_background_task(partial(_leave_with_the_job, actors, config, since))
    with contextlib.ExitStack() as stack:
        servers = []
        for actor in actors:
            stack.callback(actor.transport.close)
            servers.append(serve_health(actor, config, stack))
        _publish(actors[0].task, config, stack, actors[0].metrics_address)
        on_start(actors[0])
        if isinstance(actors[0], Chief):
            await claim(stack, actors[0])
            if actors[0].stopping.is_set():
                return actors[0].stop_code
        try:
            # zmqtrain run ends with the first mistake of a worker, and needs to see it.
            is_of_run = config.ps[0].startswith(IPC)
            results = await run_all(actors, serve_on=config.as_ps is not None and not is_of_run)
        finally:
            _note_end(actors, config)
        for actor, server in zip(actors, servers, strict=True):
            if isinstance(actor, ParameterServer) and actor.leader is not None and actor.end:
                await be_scraped(server, actors)
        if config.group and job.logdir and getattr(actors[0], "summary", None) is not None:
            forget_groups(job.logdir)
    chief = actors[0]
    if isinstance(chief, Chief) and chief.summary is not None:
        told = ["", *chief.summary.lines()]
        if config.log_format == "json":  # a collector of logs reads both streams
            told = [chief.summary.json()]
        sys.stdout.write("\n".join([*told, ""]))
        sys.stdout.flush()
    return results[0]
