"""A whole cluster as processes of this host, as `zmqtrain run` starts it.

The chief runs in this process. Each ps and worker is a process of its own. They connect by Unix
sockets in a private directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from zmqtrain.chief.chief import Chief
from zmqtrain.compute.threads import usable_cores
from zmqtrain.config import run_file
from zmqtrain.config.cluster import IPC, MAX_PORT, Role, Task
from zmqtrain.config.options import flags_of, names_of
from zmqtrain.config.restarts import USUAL_LIMITS, End, Ending, Limits, Restart
from zmqtrain.config.task import MAX_THREADS, SharedConfig, TaskConfig
from zmqtrain.errors import ConfigError, ExitCode, RunFailedError
from zmqtrain.hosting.actors import actors_of, chief_among
from zmqtrain.hosting.process import ignore_signals, serve_health, stop_on_signals
from zmqtrain.job import Job
from zmqtrain.local.children import Child, OnOutput
from zmqtrain.local.forked import ForkedProcess
from zmqtrain.local.run_directories import ps_address, remove_dead_runs, run_directory
from zmqtrain.local.supervisor import keep_running
from zmqtrain.observe.outcome import forget, recorded
from zmqtrain.observe.summary import Summary
from zmqtrain.planning.plan import Plan, plan_for
from zmqtrain.planning.strategy import local_cluster
from zmqtrain.protocol.status import Status
from zmqtrain.store.logdir import claimed
from zmqtrain.store.segment_files import file_name, remove_dead
from zmqtrain.transport.by_address import TransportByAddress

METRICS_PORT = 9409
"""Where deploy/prometheus/prometheus.yml asks for the tasks of a run."""

MAX_SOCKET_PATH_NBYTES = 103  # macOS; 4 more on Linux
END_TIMEOUT_S = 5.0  # for tasks to end after the chief
PS_TIMEOUT_S = 15.0  # for a ps to end after the workers: it may wait for its last scrape

log = logging.getLogger(__name__)


class LocalCluster(SharedConfig):
    """The size of a cluster on this host, and how it is run."""

    ps: int = Field(
        1, ge=0, le=64, description="number of parameter servers; 0: each worker hosts a part"
    )
    workers: int = Field(2, ge=1, le=256, description="number of workers")
    threads: int = Field(
        1, ge=1, le=MAX_THREADS, description="threads of a worker for linear algebra"
    )
    debug: int | None = Field(
        None,
        ge=0,
        description="number of a worker that gets this terminal, for breakpoint(); the other tasks "
        "ignore theirs",
    )
    max_restarts: int = Field(
        USUAL_LIMITS.max_restarts,
        ge=0,
        description=f"largest number of restarts of each task within {USUAL_LIMITS.within_s:g} s",
    )
    metrics_port: int | None = Field(
        None,
        ge=0,
        le=MAX_PORT,
        description="port of the run's metrics, where /sd names those of its tasks for Prometheus "
        f"(default: {METRICS_PORT} if it is free, else any free one)",
    )

    @model_validator(mode="after")
    def _check_lane(self) -> LocalCluster:
        if self.lane == "memory":
            raise ConfigError(
                f"{names_of('lane')} is memory, but the tasks of zmqtrain run are processes; "
                "expected auto, shm or tcp; or call zmqtrain.run in Python, which runs all tasks "
                "in one process"
            )
        return self

    @model_validator(mode="after")
    def _check_debug(self) -> LocalCluster:
        if self.debug is not None and self.debug >= self.workers:
            raise ConfigError(
                f"{names_of('debug')} is {self.debug}, but there are {self.workers} workers, from "
                f"0 on; expected at most {self.workers - 1}"
            )
        return self

    @property
    def debugged(self) -> Task | None:
        """The worker that has the user's terminal."""
        return None if self.debug is None else Task(Role.WORKER, self.debug)

    def shared(self) -> dict[str, Any]:
        """Return the options that all tasks share."""
        return {name: getattr(self, name) for name in SharedConfig.model_fields}


async def run_processes(
    reference: str,
    job: Job,
    cluster: LocalCluster,
    arguments: Sequence[str],
    on_progress: Callable[[Status], None],
    on_output: OnOutput,
    forked: Sequence[ForkedProcess] = (),
) -> Summary:
    """Train ``job``; every task loads it from ``reference`` with the flags ``arguments``.

    ``forked``: processes that the first tasks become; others are started from scratch.

    Raises:
        ZmqTrainError: the job cannot go on; text and exit code are those of the task that failed.
    """
    children: list[Child] = []
    failures: list[RunFailedError] = []
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(run_directory())
        config, plan = _planned(reference, job, cluster, directory)
        remove_dead_runs(config.segment_directory)
        transport = TransportByAddress()
        stack.callback(transport.close)
        stack.enter_context(claimed(job.logdir))
        chief = chief_among(actors_of(config, plan, lambda _: transport, on_progress))
        stack.enter_context(recorded(reference, job.logdir, None, lambda: chief.summary))
        forget(job.logdir)
        _serve_health(chief, config, cluster.metrics_port, stack)
        this = asyncio.current_task()
        stop_on_signals(chief, None if this is None else this.cancel)
        limits = Limits(cluster.max_restarts, USUAL_LIMITS.within_s)
        note = stack.enter_context(
            run_file.published(
                reference, plan.ps, str(config.task), chief.metrics_address, job.logdir
            )
        )
        in_order = False
        try:
            tasks = [task for task in plan.tasks if task.role is not Role.CHIEF]
            for task, process in zip_longest(tasks, forked[: len(tasks)]):
                flags = _flags(config, plan, cluster, task, arguments)
                child = Child(task, flags, on_output, process, cluster.debugged)
                children.append(child)
                keep = partial(_keep, child, children, chief, failures, limits, note)
                chief.add_background_task(keep)
            await chief.run()
            in_order = chief.ending
        except asyncio.CancelledError:
            text = "stopped at once: updates since the last checkpoint are lost"
            raise RunFailedError(text, chief.stop_code) from None
        finally:
            ignore_signals()
            await _end(children, in_order=in_order, hosted=plan.is_on_workers)
            _remove_segments(config, plan)
    if failures:
        raise RunFailedError(f"{failures[0]}; {_remedy(chief)}", failures[0].exit_code)
    if chief.summary is None:
        raise RunFailedError("the run was stopped before the job began", chief.stop_code)
    return chief.summary


def _planned(
    reference: str, job: Job, cluster: LocalCluster, directory: Path
) -> tuple[TaskConfig, Plan]:
    """Return the chief's configuration and the plan of all tasks."""
    address = partial(ps_address, directory)
    longest = address(max(cluster.ps, cluster.workers) - 1).removeprefix(IPC)
    if len(os.fsencode(longest)) > MAX_SOCKET_PATH_NBYTES:
        raise ConfigError(
            f"{directory.parent} is too long a path for Unix sockets; set TMPDIR to a shorter one"
        )
    tasks = local_cluster(job.strategy, cluster.ps, cluster.workers, address)
    plan = plan_for(job, tasks, lane=cluster.lane, crash_safe=cluster.crash_safe)
    shared = {"metrics_port": 0, **cluster.shared()}
    return TaskConfig(role=Role.CHIEF, job=reference, **shared), plan


def _serve_health(
    chief: Chief, config: TaskConfig, port: int | None, stack: contextlib.ExitStack
) -> None:
    wanted = METRICS_PORT if port is None else port
    try:
        serve_health(chief, config.model_copy(update={"metrics_port": wanted}), stack)
    except ConfigError:
        if port is not None:
            raise
        serve_health(chief, config, stack)  # another run has it


def _flags(
    config: TaskConfig, plan: Plan, cluster: LocalCluster, task: Task, arguments: Sequence[str]
) -> list[str]:
    threads = cluster.threads
    if task.role is Role.PS:  # all update at once, so they share the cores
        threads = max(1, usable_cores() // cluster.ps)
    ps, workers = ",".join(plan.ps), str(plan.workers)
    if plan.is_on_workers:
        ps, workers = "0", ",".join(plan.worker_addresses)
    return [
        *("--job", config.job, "--index", str(task.index), "--chief"),
        *("--ps", ps, "--workers", workers),
        *("--metrics-port", "0", "--threads", str(threads)),
        *flags_of(cluster.shared()),
        *arguments,
        *(("--log-format", "text") if task == cluster.debugged else ()),
    ]


async def _keep(
    child: Child,
    children: Sequence[Child],
    chief: Chief,
    failures: list[RunFailedError],
    limits: Limits,
    note: Callable[[str, Restart], None],
) -> None:
    """Run a task; restart it when it was killed, end the run when it fails.

    If a ps fails, or a worker that hosts one, its parameters are lost. If it was only killed too
    often, it is started once more for the chief to save. The chief can also save if another worker
    fails. Then the error is added to ``failures``.
    """
    name = str(child.task)
    ending, end = await keep_running(
        name, child.start, limits, lambda: chief.ending, on_restart=partial(note, name)
    )
    await child.wait()
    if chief.ending:
        return
    error = _failure(child, ending, end)
    if chief.plan.shard_of(child.task) is not None:
        if not end.used_up:
            raise error
        failures.append(error)
        return await _save_in_a_last_life(child, chief, error)
    alive = sum(other.task.role is Role.WORKER and other.is_alive for other in children)
    code = ending.returncode
    if alive and not end.exit_code and (code < 0 or code == ExitCode.TERMINATED):
        log.warning("%s; training goes on; workers left: %d", error, alive)
        return
    failures.append(error)
    chief.fail(error)


async def _save_in_a_last_life(child: Child, chief: Chief, error: RunFailedError) -> None:
    """Start a ps once more, with its shard in shared memory, for the chief to end the run."""
    log.warning("%s; starting it for a last time, so that the chief can save", error)
    chief.fail(error)
    await child.start()
    await child.wait()
    if not chief.ending:
        raise RunFailedError(f"{error}; {_remedy(chief)}", error.exit_code)


def _failure(child: Child, ending: Ending, end: End) -> RunFailedError:
    """Return the error of a task that is not started again."""
    code = ending.returncode
    is_known = code < 0 or code in set(ExitCode) - {ExitCode.OK}
    exit_code = ExitCode.CRASH if not is_known else ExitCode.PEER_LOST if code < 0 else code
    text = child.last_error()
    if end.exit_code:
        exit_code, text = end.exit_code, f"{end.reason}\n{text}"
    if code == ExitCode.OK:
        text = "the job was not done; does its model or its data call sys.exit()?"
    if end.used_up:
        text = end.reason if code < 0 else f"{text}; {end.reason}"
    return RunFailedError(f"{child.task} {ending}: {text}", exit_code)


def _remedy(chief: Chief) -> str:
    """Return how a run that has failed can go on, as a part of a sentence."""
    job = chief.job
    if chief.saved_step is not None:
        return f"run the same command to resume from step {chief.saved_step}"
    if job.logdir is None:
        return "nothing was saved, because the job has no logdir; give one with --logdir"
    return (
        f"nothing was saved, because --save-secs is {job.save_secs:g}; give a smaller one, and run "
        "the same command to begin again"
    )


def _remove_segments(config: TaskConfig, plan: Plan) -> None:
    """Remove the segments of killed ps, which will not be restarted."""
    directory = config.segment_directory
    if directory is not None:
        for index, address in enumerate(plan.ps):
            remove_dead(directory / file_name(str(Task(Role.PS, index)), address))


async def _end(children: Sequence[Child], *, in_order: bool, hosted: bool) -> None:
    """Wait for the end of all tasks.

    Without ``in_order`` the chief has sent no shutdown, and nothing can be saved: kill them.
    ``hosted``: whether workers host the ps, and so end as these do.
    """
    ps = [child for child in children if hosted or child.task.role is Role.PS]
    workers = [child for child in children if child not in ps]
    if not in_order:
        for child in children:
            child.signal(signal.SIGKILL)
    gone = [asyncio.gather(*(child.wait() for child in group)) for group in (ps, workers)]
    # A ps ends after its workers.
    first = asyncio.ALL_COMPLETED if hosted else asyncio.FIRST_COMPLETED
    await asyncio.wait(gone, timeout=END_TIMEOUT_S, return_when=first)
    for worker in workers:
        worker.signal(signal.SIGTERM)  # it may have started too late for the shutdown
    await asyncio.wait(gone[1:], timeout=END_TIMEOUT_S)
    for worker in workers:
        if worker.is_alive:
            log.warning("%s does not end: killing it", worker.task)
            worker.signal(signal.SIGKILL)
    await asyncio.wait(gone, timeout=PS_TIMEOUT_S)
    for child in ps:
        child.signal(signal.SIGKILL)  # it still waits for a worker that left without a message
    await asyncio.gather(*gone)
