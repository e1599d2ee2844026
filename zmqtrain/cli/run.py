"""`zmqtrain run`: a whole local cluster, with a live view."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import click
import uvloop
from rich.console import Console
from rich.live import Live
from rich.text import Text

from zmqtrain.chief.progress import ProgressLog
from zmqtrain.chief.status_history import StatusHistory
from zmqtrain.cli.output import show_json
from zmqtrain.cli.top_view import top_view
from zmqtrain.compute.threads import limit_threads
from zmqtrain.config.cluster import Role, Task
from zmqtrain.config.commands import command
from zmqtrain.config.fit_script import is_fit_script
from zmqtrain.config.job_file import load_job
from zmqtrain.config.options import flags_of, mistyped, option_of, options_of, values_of
from zmqtrain.config.task import ENVIRON, TaskConfig, forget_tf_config
from zmqtrain.errors import ZmqTrainError
from zmqtrain.hosting.process import allow_descriptors
from zmqtrain.hosting.signals import interrupts_kept
from zmqtrain.job import Job
from zmqtrain.local.forked import forked
from zmqtrain.local.processes import LocalCluster, run_processes
from zmqtrain.observe.logs import line_as_json, line_as_text, setup_logging
from zmqtrain.observe.summary import Summary
from zmqtrain.planning.strategy import MIRRORED, is_mirrored, local_cluster
from zmqtrain.protocol.status import Status
from zmqtrain.roles import script

REFRESH_S = 0.5
DEBUGGING_S = 86400.0
"""How long a task may be silent, for its process stands still in the debugger."""

NEWS = ("zmqtrain.chief",)
"""Loggers whose INFO lines a person wants to see: resuming, saving, evaluations."""

log = logging.getLogger(__name__)


@command("run", context_settings={"max_content_width": 100})
@click.argument("job_reference", metavar="JOB")
@options_of(LocalCluster)
@option_of(TaskConfig, "log_format")
@options_of(Job, optional=True)
@click.option("--json", "as_json", is_flag=True, help="print the summary as one line of JSON")
@click.option("--verbose", is_flag=True, help="show the log of all tasks")
def run_command(job_reference: str, as_json: bool, verbose: bool, **flags: Any) -> None:
    """Train JOB with a local cluster of processes.

    JOB is file.py, file.py:name or package.module:name, or a script that calls Trainer.fit, which
    goes on in this process after the training. Ctrl-C ends the run: with a logdir it saves, and the
    same command resumes. Output and warnings of the tasks appear on stderr as "worker 0 | ...".

    \b
    Examples:
      zmqtrain run examples/digits.py
      zmqtrain run examples/digits.py --workers 4 --policy bounded-staleness:4
      zmqtrain run examples/digits.py --ps 2 --logdir /tmp/digits --save-secs 10
      zmqtrain run examples/digits.py --ps 0 --workers 3
      zmqtrain run examples/mnist.py --data DIR --policy sync-replicas --json
      zmqtrain run net.py --debug 0
    """
    script.refuse_task("zmqtrain run")
    forget_tf_config()  # the tasks get their cluster by flags
    level, log_format = "info" if verbose else "warning", flags["log_format"] or "text"
    setup_logging(str(Task(Role.CHIEF, 0)), level, log_format)
    for text in mistyped(ENVIRON, TaskConfig, Job):
        log.warning("%s", text)
    cluster = LocalCluster(**values_of(LocalCluster, flags))
    overrides = values_of(Job, flags)
    if "strategy" in overrides:  # a contradiction is found before the job is loaded
        local_cluster(overrides["strategy"], flags["ps"], flags["workers"] or 1)
    # Tasks send their log as JSON; the user may see it as text.
    arguments = flags_of(overrides | {"log_level": level, "log_format": "json"})
    is_debugged = cluster.debug is not None  # then each task is a new process
    if is_debugged:
        sys.breakpointhook = lambda *_, **__: None  # of the chief, which has no terminal

    def train(job: Job) -> Summary:
        planned = _planned(cluster, job, flags)
        limit_threads(planned.threads)
        # Connections and pipes; a worker may be both.
        allow_descriptors(2 * (planned.ps or planned.workers) + planned.workers)
        try:
            hidden: Any = nullcontext(lambda status: None)  # the debugger has the terminal
            with hidden if is_debugged else display(job_reference) as on_progress:
                running = run_processes(
                    job_reference,
                    job,
                    planned,
                    arguments,
                    on_progress,
                    _show_as_json if log_format == "json" else _show_as_text,
                    processes,
                )
                summary = uvloop.run(running)
        except ZmqTrainError as error:
            if as_json:
                show_json({"ended": str(error), "exit_code": int(error.exit_code)})
            raise
        finally:
            sys.breakpointhook = sys.__breakpointhook__
        as_lines = not as_json and log_format == "text"
        click.echo("\n".join(summary.lines()) if as_lines else summary.json())
        return summary

    with forked(0 if is_debugged else cluster.ps + cluster.workers) as processes:
        if is_fit_script(job_reference):
            code = script.run_fit(train, job_reference, overrides)
        else:
            with interrupts_kept():
                job = load_job(job_reference, **overrides)
            code = train(job).exit_code
    sys.exit(code)


def _planned(cluster: LocalCluster, job: Job, flags: Mapping[str, Any]) -> LocalCluster:
    """Return the cluster that the job's strategy makes of the flags."""
    strategy: str = job.strategy
    workers = cluster.workers
    if is_mirrored(job, alone=flags["ps"] is None and flags["workers"] is None):
        strategy, workers = MIRRORED, flags["workers"] or 1
    ps = len(local_cluster(strategy, flags["ps"], workers).ps)
    is_debugged = cluster.debug is not None
    patience = dict.fromkeys(("lease_s", "peer_timeout_s"), DEBUGGING_S) if is_debugged else {}
    return cluster.model_copy(update={"ps": ps, "workers": workers} | patience)


def _show_as_text(task: Task, line: str) -> None:
    """Show a line of a task's log like our own log; show other output with the task's name."""
    shown = line_as_text(line)
    # To sys.stderr, which the live view redirects.
    sys.stderr.write(f"{shown}\n" if shown != line else f"{task} | {line}\n")


def _show_as_json(task: Task, line: str) -> None:
    sys.stderr.write(f"{line_as_json(str(task), line)}\n")


@contextmanager
def display(title: str) -> Iterator[Callable[[Status], None]]:
    """Yield a function that shows a status: on a terminal as `top` does, else as lines of the log.

    The loggers in NEWS write to the log in both cases.
    """
    for name in NEWS:
        logging.getLogger(name).setLevel(logging.INFO)
    console = Console(stderr=True)
    if not console.is_terminal or console.is_dumb_terminal:
        yield ProgressLog()
        return
    watched, next_at = StatusHistory(), 0.0
    starting = Text(f"{title}: starting")
    with Live(starting, console=console, auto_refresh=False) as live, _log_above():

        def show(status: Status) -> None:
            nonlocal next_at
            now = time.monotonic()
            if now >= next_at or status.stop:
                next_at = now + REFRESH_S
                watched.take(status, now)
                live.update(top_view(watched, title, (), console), refresh=True)

        yield show


@contextmanager
def _log_above() -> Iterator[None]:
    """Write the log above a live view, which has replaced ``sys.stderr``."""
    handlers = [h for h in logging.getLogger().handlers if isinstance(h, logging.StreamHandler)]
    before = [handler.setStream(sys.stderr) for handler in handlers]
    try:
        yield
    finally:
        for handler, stream in zip(handlers, before, strict=True):
            if stream is not None:
                handler.setStream(stream)
