"""A whole cluster as processes of this host: what `zmqtrain run` starts.

The chief runs in this process, so that progress and the summary need no way home; the ps and the
workers are processes of their own. They meet at Unix sockets in a private directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from zmqtrain import run_file
from zmqtrain.cluster import Role, Task
from zmqtrain.config import TaskConfig
from zmqtrain.errors import ExitCode, PeerLostError, ZmqTrainError
from zmqtrain.job import Job
from zmqtrain.roles.chief import Chief
from zmqtrain.roles.hosting import ignore_signals, make_chief, serve_health, stop_on_signals
from zmqtrain.summary import Summary
from zmqtrain.timing import Timing
from zmqtrain.transport.router_dealer import ZmqTransport
from zmqtrain.wire.messages import Status

FAREWELL_S = 5.0  # how long tasks may take to end after the chief

log = logging.getLogger(__name__)


class LocalCluster(Timing):
    """The size of a cluster on this host, and how it is run."""

    ps: int = Field(1, ge=1, le=64, description="how many parameter servers")
    workers: int = Field(2, ge=1, le=256, description="how many workers")
    threads: int = Field(1, ge=1, description="threads of a worker's linear algebra")


class ChildError(ZmqTrainError):
    """A task of the cluster ended with an error of its own; the text is the task's."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = ExitCode(exit_code) if exit_code in set(ExitCode) else ExitCode.CRASH


@dataclass(frozen=True, slots=True)
class Child:
    """One started task and where its log goes."""

    task: Task
    process: asyncio.subprocess.Process
    log: Path

    def last_words(self) -> str:
        """Return the task's error, or the end of its log."""
        lines = self.log.read_text(errors="replace").splitlines()
        errors = [line.partition(" ERROR ")[2] for line in lines if " ERROR " in line]
        if errors:
            return errors[-1]
        plain = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return plain[-1] if plain else "\n".join(lines[-15:]) or "it left no word"


async def run_processes(
    reference: str,
    job: Job,
    cluster: LocalCluster,
    arguments: Sequence[str],
    on_progress: Callable[[Status], None],
) -> Summary:
    """Train ``job``, which ``reference`` and the flags ``arguments`` give to every task.

    Raises:
        ZmqTrainError: the job cannot go on; text and exit code are those of the task that failed.
    """
    directory = Path(tempfile.mkdtemp(prefix="zmqtrain-"))
    addresses = tuple(f"ipc://{directory}/ps-{index}.sock" for index in range(cluster.ps))
    config = TaskConfig(
        role=Role.CHIEF,
        job=reference,
        ps=addresses,
        workers=cluster.workers,
        metrics_port=0,
        **{name: getattr(cluster, name) for name in Timing.model_fields},
    )
    transport = ZmqTransport()
    chief = make_chief(config, job, transport, on_progress)
    children: list[Child] = []
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        stack.callback(transport.close)
        serve_health(chief, config, stack)
        stop_on_signals(chief)
        stack.enter_context(run_file.published(reference, addresses))
        try:
            for task in _tasks(cluster):
                command = _command(config, cluster, task, arguments)
                children.append(await _start(task, command, directory))
                chief.accompany(_mind(children[-1], children, chief))
            await chief.run()
        finally:
            ignore_signals()
            await _end(children)
    if chief.summary is None:
        raise PeerLostError("the run was stopped before the job began")
    return chief.summary


def _tasks(cluster: LocalCluster) -> list[Task]:
    return [Task(Role.PS, index) for index in range(cluster.ps)] + [
        Task(Role.WORKER, index) for index in range(cluster.workers)
    ]


def _command(
    config: TaskConfig, cluster: LocalCluster, task: Task, arguments: Sequence[str]
) -> list[str]:
    timing = [
        part
        for name in Timing.model_fields
        for part in (f"--{name.replace('_', '-')}", str(getattr(cluster, name)))
    ]
    return [
        *(sys.executable, "-m", f"zmqtrain.roles.{task.role}"),
        *("--job", config.job, "--index", str(task.index), "--chief"),
        *("--ps", ",".join(config.ps), "--workers", str(config.workers)),
        *("--metrics-port", "0", "--threads", str(cluster.threads)),
        *timing,
        *arguments,
    ]


async def _start(task: Task, command: Sequence[str], directory: Path) -> Child:
    path = directory / f"{task.role}-{task.index}.log"
    with path.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C is for the chief, which ends the run in order
        )
    return Child(task, process, path)


async def _mind(child: Child, children: Sequence[Child], chief: Chief) -> None:
    """End the run when a task fails that it cannot do without."""
    code = await child.process.wait()
    if chief.ending:
        return
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    workers = [other for other in children if other.task.role is Role.WORKER]
    alive = [other for other in workers if other.process.returncode is None]
    text = f"{child.task} {how}: {child.last_words()}"
    if child.task.role is Role.WORKER and code < 0 and alive:
        log.warning("%s; training goes on with %d workers", text, len(alive))
        return
    raise ChildError(text, code)


async def _end(children: Sequence[Child]) -> None:
    """Wait for the tasks to leave; kill those that do not."""
    try:
        async with asyncio.timeout(FAREWELL_S):
            for child in children:
                await child.process.wait()
    except TimeoutError:
        for child in children:
            if child.process.returncode is None:
                log.warning("%s does not leave: it is killed", child.task)
                child.process.kill()
                await child.process.wait()
