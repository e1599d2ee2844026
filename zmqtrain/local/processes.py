"""A whole cluster as processes of this host: what `zmqtrain run` starts.

The chief runs in this process, so that progress and the summary need no way home; the ps and the
workers are processes of their own. They meet at Unix sockets in a private directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pydantic import Field

from zmqtrain.chief.chief import Chief
from zmqtrain.compute.threads import usable_cores
from zmqtrain.config import run_file
from zmqtrain.config.cluster import Role, Task
from zmqtrain.config.restarts import USUAL_LIMITS, End, Ending, decide
from zmqtrain.config.task import MAX_THREADS, TaskConfig
from zmqtrain.config.timing import Timing
from zmqtrain.errors import ConfigError, ExitCode, ZmqTrainError
from zmqtrain.job import Job
from zmqtrain.local.fork_server import ForkServer, TaskProcess
from zmqtrain.observe.summary import Summary
from zmqtrain.roles.hosting import ignore_signals, serve_health, stop_on_signals
from zmqtrain.store.claim import claimed
from zmqtrain.store.segment_files import default_directory, file_name, remove_dead
from zmqtrain.transport.by_address import TransportByAddress
from zmqtrain.wire.messages import Status

MAX_SOCKET_PATH_NBYTES = 103  # macOS; 4 more on Linux
FAREWELL_S = 5.0  # how long tasks may take to end after the chief
LINGER_S = 1.0  # how long a ps may take after the workers, some of which have not said goodbye

_ERROR = re.compile(r"\d\d:\d\d:\d\d\.\d{3} \S+ ERROR |error: |Error: ")
_EVENT = re.compile(r"\d\d:\d\d:\d\d\.\d{3} ")

log = logging.getLogger(__name__)


class LocalCluster(Timing):
    """The size of a cluster on this host, and how it is run."""

    ps: int = Field(1, ge=1, le=64, description="how many parameter servers")
    workers: int = Field(2, ge=1, le=256, description="how many workers")
    threads: int = Field(
        1, ge=1, le=MAX_THREADS, description="threads of a worker's linear algebra"
    )


class ChildError(ZmqTrainError):
    """A task of the cluster ended with an error of its own; the text is the task's."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        if exit_code < 0:  # a signal, not a word of its own
            self.exit_code = ExitCode.PEER_LOST
        else:
            self.exit_code = ExitCode(exit_code) if exit_code in set(ExitCode) else ExitCode.CRASH


class StoppedError(ZmqTrainError):
    """Signals ended the run before there was anything to sum up."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = ExitCode(exit_code)


@dataclass(slots=True)
class Child:
    """One task, how it is started, where its log goes; ``process`` is that of its present life."""

    task: Task
    process: TaskProcess
    start: Callable[[], Awaitable[TaskProcess]]
    log: Path

    def last_error(self) -> str:
        """Return the task's last error, a bug's with its traceback, or the end of its log."""
        lines = self.log.read_text(errors="replace").splitlines()
        errors = [number for number, line in enumerate(lines) if _ERROR.match(line)]
        if not errors:
            return "\n".join(lines[-15:]) or "it left no word"
        first, *rest = lines[errors[-1] :]
        end = next((i for i, line in enumerate(rest) if _EVENT.match(line)), len(rest))
        return "\n".join([_ERROR.sub("", first, count=1), *rest[:end]])


async def run_processes(
    reference: str,
    job: Job,
    cluster: LocalCluster,
    arguments: Sequence[str],
    on_progress: Callable[[Status], None],
    segment_dir: str | None = None,
    fork_server: ForkServer | None = None,
) -> Summary:
    """Train ``job``, which ``reference`` and the flags ``arguments`` give to every task.

    ``segment_dir``: where they have the ps keep their memory, if not in shared memory.
    ``fork_server``: where tasks are started, if there is one already.

    Raises:
        ZmqTrainError: the job cannot go on; text and exit code are those of the task that failed.
    """
    children: list[Child] = []
    failures: list[ChildError] = []
    with contextlib.ExitStack() as stack:
        directory = Path(tempfile.mkdtemp(prefix="zmqtrain-"))
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        config = _chief_config(reference, cluster, directory)
        if fork_server is None:
            fork_server = ForkServer()
            stack.callback(fork_server.close)
        transport = TransportByAddress()
        stack.callback(transport.close)
        stack.enter_context(claimed(job.logdir))
        chief = Chief(config, job, transport, on_progress)
        serve_health(chief, config, stack)
        this = asyncio.current_task()
        stop_on_signals(chief, None if this is None else this.cancel)
        stack.enter_context(run_file.published(reference, config.ps, str(config.task)))
        in_order = False
        try:
            for task in _tasks(cluster):
                flags = _flags(config, cluster, task, arguments)
                path = directory / f"{task.role}-{task.index}.log"
                start = partial(fork_server.start, task.role, flags, path)
                children.append(Child(task, await start(), start, path))
                minding = partial(_mind, children[-1], fork_server, children, chief, failures)
                chief.add_background_task(minding)
            await chief.run()
            in_order = chief.ending
        except asyncio.CancelledError:
            text = "stopped at once: what was learned since the last checkpoint is lost"
            raise StoppedError(text, chief.stop_code) from None
        finally:
            ignore_signals()
            await _end(children, in_order=in_order)
            _remove_segments(config, segment_dir)
    if failures:
        if chief.summary is not None and chief.summary.checkpoint is not None:
            log.warning("the same command goes on from %s", chief.summary.checkpoint)
        raise failures[0]
    if chief.summary is None:
        raise StoppedError("the run was stopped before the job began", chief.stop_code)
    return chief.summary


def _chief_config(reference: str, cluster: LocalCluster, directory: Path) -> TaskConfig:
    sockets = [directory / f"ps-{index}.sock" for index in range(cluster.ps)]
    if len(os.fsencode(sockets[-1])) > MAX_SOCKET_PATH_NBYTES:
        raise ConfigError(
            f"{directory.parent} is too long a path for Unix sockets: set TMPDIR to a shorter one"
        )
    return TaskConfig(
        role=Role.CHIEF,
        job=reference,
        ps=tuple(f"ipc://{path}" for path in sockets),
        workers=cluster.workers,
        metrics_port=0,
        **{name: getattr(cluster, name) for name in Timing.model_fields},
    )


def _tasks(cluster: LocalCluster) -> list[Task]:
    return [Task(Role.PS, index) for index in range(cluster.ps)] + [
        Task(Role.WORKER, index) for index in range(cluster.workers)
    ]


def _threads(cluster: LocalCluster, role: Role) -> int:
    """Return the threads of a task. While a ps updates, it is other ps that want the cores."""
    return cluster.threads if role == Role.WORKER else max(1, usable_cores() // cluster.ps)


def _flags(
    config: TaskConfig, cluster: LocalCluster, task: Task, arguments: Sequence[str]
) -> list[str]:
    timing = [
        part
        for name in Timing.model_fields
        for part in (f"--{name.replace('_', '-')}", str(getattr(cluster, name)))
    ]
    return [
        *("--job", config.job, "--index", str(task.index), "--chief"),
        *("--ps", ",".join(config.ps), "--workers", str(config.workers)),
        *("--metrics-port", "0", "--threads", str(_threads(cluster, task.role))),
        *timing,
        *arguments,
    ]


async def _mind(
    child: Child,
    fork_server: ForkServer,
    children: Sequence[Child],
    chief: Chief,
    failures: list[ChildError],
) -> None:
    """Start a task again when it was killed; end the run when it fails.

    A ps that fails takes its parameters along. If a worker fails, the chief can still save what was
    learned: it is asked to end in order, and the error is left in ``failures``.
    """
    code = await _lives(child, fork_server, chief)
    if chief.ending:
        return
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    text = f"{child.task} {how}: {child.last_error()}"
    error = ChildError(text, code)
    if child.task.role is not Role.WORKER:
        raise error
    workers = [other for other in children if other.task.role is Role.WORKER]
    alive = [other for other in workers if other.process.returncode is None]
    if alive and (code < 0 or code == ExitCode.TERMINATED):
        log.warning("%s; training goes on with %d workers", text, len(alive))
        return
    failures.append(error)
    chief.stop(error.exit_code)


async def _lives(child: Child, fork_server: ForkServer, chief: Chief) -> int:
    """See a task through all its lives; return the return code of the last."""
    endings: list[Ending] = []
    while True:
        started_at = time.monotonic()
        code = await child.process.wait()
        fork_server.check()
        endings.append(Ending(code, started_at, time.monotonic()))
        decision = decide(endings, USUAL_LIMITS, random.random())
        if chief.ending or isinstance(decision, End):
            return code
        log.warning("%s %s: it starts again", child.task, endings[-1])
        await asyncio.sleep(decision.delay_s)
        child.process = await child.start()


def _remove_segments(config: TaskConfig, segment_dir: str | None) -> None:
    """Remove what ps left that were killed: there is no other life for them."""
    directory = Path(segment_dir) if segment_dir else default_directory()
    if directory is not None:
        for index, address in enumerate(config.ps):
            remove_dead(directory / file_name(str(Task(Role.PS, index)), address))


async def _end(children: Sequence[Child], *, in_order: bool) -> None:
    """See all tasks off.

    Without ``in_order`` nobody has told them to leave, and there is nothing left to save.
    """
    ps = [child for child in children if child.task.role is Role.PS]
    workers = [child for child in children if child.task.role is Role.WORKER]
    if not in_order:
        for child in children:
            child.process.signal(signal.SIGKILL)
    gone = [asyncio.ensure_future(_gone(group)) for group in (ps, workers)]
    # A ps leaves when the workers have that took part.
    await asyncio.wait(gone, timeout=FAREWELL_S, return_when=asyncio.FIRST_COMPLETED)
    for worker in workers:
        worker.process.signal(signal.SIGTERM)  # if it came too late to hear of the end
    await asyncio.wait(gone[1:], timeout=FAREWELL_S)
    for worker in workers:
        if worker.process.returncode is None:
            log.warning("%s does not leave: it is killed", worker.task)
            worker.process.signal(signal.SIGKILL)
    await asyncio.wait(gone, timeout=LINGER_S)
    for child in ps:
        child.process.signal(signal.SIGKILL)  # it waits for a worker that left without a goodbye
    await asyncio.gather(*gone)


async def _gone(children: Sequence[Child]) -> None:
    for child in children:
        await child.process.wait()
