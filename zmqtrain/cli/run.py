"""`zmqtrain run`: a whole local cluster, watched live."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
import uvloop
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from threadpoolctl import threadpool_limits

from zmqtrain.chief.progress import ProgressLog, shown_loss
from zmqtrain.config.cluster import Role
from zmqtrain.config.options import (
    flag_of,
    mistyped,
    names_of,
    option_of,
    options_of,
    values_of,
)
from zmqtrain.config.task import ENVIRON, TaskConfig
from zmqtrain.errors import ConfigError
from zmqtrain.job import Job, load_job
from zmqtrain.local.fork_server import ForkServer
from zmqtrain.local.processes import LocalCluster, run_processes
from zmqtrain.observe.logs import setup_logging
from zmqtrain.wire.messages import Status, TaskStatus

REFRESHES_PER_SECOND = 4
NEWS = ("zmqtrain.chief",)
"""Who logs what people want to know of a run: where it resumes from, saves, evaluations."""

MEMORY = ("lane", "segment_dir", "crash_safe")
"""Those of a task's options that decide where a shard lies, and how tensors travel."""

log = logging.getLogger(__name__)


@click.command("run", context_settings={"max_content_width": 100})
@click.argument("job_reference", metavar="JOB")
@options_of(LocalCluster)
@option_of(TaskConfig, "lane")
@option_of(TaskConfig, "segment_dir")
@option_of(TaskConfig, "crash_safe")
@options_of(Job, optional=True)
@click.option("--json", "as_json", is_flag=True, help="print the summary as one line of JSON")
@click.option("--verbose", is_flag=True, help="log what the chief does")
@click.pass_obj
def run_command(
    fork_server: ForkServer | None,
    /,
    job_reference: str,
    as_json: bool,
    verbose: bool,
    **flags: Any,
) -> None:
    """Train JOB with a local cluster of processes and show how it goes.

    JOB is file.py, file.py:name or package.module:name. Ctrl-C stops in order: a job with a logdir
    saves a checkpoint, and the same command resumes from it.

    \b
    Examples:
      zmqtrain run examples/digits.py
      zmqtrain run examples/digits.py --workers 4 --policy bounded-staleness:4
      zmqtrain run examples/digits.py --ps 2 --logdir /tmp/digits --save-secs 10
      zmqtrain run examples/mnist.py --data DIR --policy sync-replicas --json
    """
    setup_logging("C", "info" if verbose else "warning")
    for text in mistyped(ENVIRON, TaskConfig, Job):
        log.warning("%s", text)
    cluster = LocalCluster(**values_of(LocalCluster, flags))
    overrides = values_of(Job, flags)
    memory = {name: flags[name] for name in MEMORY if flags[name] is not None}
    if memory.get("lane") == "memory":
        raise ConfigError(
            f"{names_of('lane')} is memory, but the tasks of zmqtrain run are processes; expected "
            "auto, shm or tcp; or call zmqtrain.run in Python, which has all tasks in one process"
        )
    job = load_job(job_reference).with_overrides(**overrides)
    arguments = _as_flags(memory | overrides)
    threadpool_limits(cluster.threads)
    with _display(job_reference) as show:
        running = run_processes(
            job_reference, job, cluster, arguments, show, memory.get("segment_dir"), fork_server
        )
        summary = uvloop.run(running)
    click.echo(summary.json() if as_json else "\n".join(summary.lines()))
    sys.exit(summary.exit_code)


def _as_flags(values: dict[str, Any]) -> list[str]:
    """Return the flags that give these values of options to another process."""
    arguments: list[str] = []
    for name, value in values.items():
        flag = flag_of(name)
        if isinstance(value, bool):
            arguments.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            arguments += [flag, str(value)]
    return arguments


class _Screen:
    """The live view: a bar for the global step, figures, a line for each worker."""

    def __init__(self, live: Live, title: str) -> None:
        self._live = live
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=live.console,
        )
        self._step = self._bar.add_task(title, total=None)
        self._next_at = 0.0

    def __call__(self, status: Status) -> None:
        if time.monotonic() < self._next_at and not status.stop:
            return
        self._next_at = time.monotonic() + 1 / REFRESHES_PER_SECOND
        self._bar.update(self._step, total=status.steps, completed=status.step)
        self._live.update(Group(self._bar, view(status)), refresh=True)


@contextmanager
def _display(title: str) -> Iterator[Any]:
    """Yield a function that shows a status: live on a terminal, else as lines of the log.

    News of the run are lines of the log in any case.
    """
    for name in NEWS:
        logging.getLogger(name).setLevel(logging.INFO)
    console = Console(stderr=True)
    if not console.is_terminal:
        yield ProgressLog()
        return
    with Live(console=console, auto_refresh=False) as live, _log_above():
        yield _Screen(live, title)


@contextmanager
def _log_above() -> Iterator[None]:
    """Have the log appear above a live view, which has taken over ``sys.stderr``."""
    handlers = [h for h in logging.getLogger().handlers if isinstance(h, logging.StreamHandler)]
    before = [handler.setStream(sys.stderr) for handler in handlers]
    try:
        yield
    finally:
        for handler, stream in zip(handlers, before, strict=True):
            if stream is not None:
                handler.setStream(stream)


def view(status: Status) -> RenderableType:
    """Return the figures of a status and a line for each worker, for a terminal."""
    following = f" -> {status.switching}" if status.switching else ""
    figures = Table.grid(padding=(0, 3))
    figures.add_row(
        f"{status.steps_per_second:.0f} steps/s",
        f"loss {shown_loss(status)}",
        "staleness {mean:.2f} (p99 {p99:.0f})".format(**status.staleness),
        "pushes {applied} applied, {dropped} dropped".format(**status.pushes),
    )
    workers = Table(box=None, pad_edge=False)
    for column in ("task", "state", "pushes", "loss", "batches held", "silent"):
        workers.add_column(column, justify="left" if column in ("task", "state") else "right")
    for task in status.tasks:
        if task.role == Role.WORKER:
            workers.add_row(*_cells(task))
    return Group(f"policy {status.policy}{following}", figures, workers)


def _cells(task: TaskStatus) -> tuple[str, ...]:
    leases = ", ".join(map(str, task.leases))
    return (
        task.task,
        task.state,
        str(task.step),
        f"{task.loss:.4f}",
        leases or "-",
        f"{task.silent_s:.1f} s",
    )
