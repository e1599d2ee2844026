"""`zmqtrain top`: watches a running job, on a terminal or over ssh."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime

import click
from rich.console import Console
from rich.live import Live

from zmqtrain.chief.progress import line
from zmqtrain.chief.status_history import StatusHistory
from zmqtrain.cli.output import say, show_json
from zmqtrain.cli.remote import RemoteJob, about_a_job, reached
from zmqtrain.cli.status import show_ended, status_json
from zmqtrain.cli.top_view import top_view
from zmqtrain.config.commands import command
from zmqtrain.errors import ConfigError, PeerLostError
from zmqtrain.protocol.status import Status

REFRESH_S = 1.0
PAUSE_S = 0.2  # between two questions, however much happens
PATIENCE_S = 2.0  # until ps 0 counts as away
SHOWN_NEWS = 4


@command("top")
@about_a_job
@click.option("--json", "as_json", is_flag=True, help="print a JSON object each second")
def top_command(job: RemoteJob, *, as_json: bool) -> None:
    """Watch a running job, until Ctrl-C or the end of the job.

    Speeds are those of the last seconds. A worker's bar shows where its steps spend their time: in
    getting data, pulling parameters, computing, pushing the gradient, updating (on a board; else
    the ps do that during the push), and waiting for others. Below the tasks are the absent
    ones, the longest waits, and what has happened meanwhile. While ps 0 is away, its last answer is
    shown. Without a terminal the command prints lines.

    \b
    Examples:
      zmqtrain top                          # the one job on this host
      zmqtrain top --ps host:2222           # a job on another host
      zmqtrain top digits-x7k2              # a submitted job
      zmqtrain top --json | jq .steps_per_second
    """
    console = Console()
    if job.ended is not None:
        show_ended(job.ended, as_json=as_json)
        return
    with contextlib.suppress(KeyboardInterrupt):
        if as_json:
            for status in filter(None, statuses(job)):
                show_json(status_json(status, job))
        elif console.is_terminal and not console.is_dumb_terminal:
            _show(job, console)
        else:
            _write_lines(job)


def statuses(job: RemoteJob) -> Iterator[Status | None]:
    """Yield the job's status now, then once a second until the job ends; None if ps 0 is away.

    Raises:
        PeerLostError: ps 0 has never answered.
    """
    status = job.status()
    yield status
    asked = replace(job, timeout_s=min(job.timeout_s, PATIENCE_S))
    with contextlib.ExitStack() as stack:
        while not (status.stop or status.failure):
            next_at = time.monotonic() + REFRESH_S
            try:
                status = _status_at(next_at, asked, status.event)
                yield status
                continue
            except PeerLostError:
                if job.has_ended():
                    return
                yield None
            time.sleep(max(0.0, next_at - time.monotonic()))
            if job.submitted is not None:  # it may be at another address now
                stack.close()
                try:
                    asked = stack.enter_context(reached(job.name, asked.timeout_s))
                except ConfigError:  # it was stopped, and is forgotten
                    return


def _status_at(at: float, job: RemoteJob, seen: int) -> Status:
    """Return the job's status at this time, or at its end, whichever comes first.

    Ps 0 answers at once when something happens, such as the end, or a checkpoint.
    """
    while True:
        status = job.status(seen, max(0.0, at - time.monotonic()))
        if status.stop or status.failure or time.monotonic() >= at:
            return status
        seen = status.event
        time.sleep(PAUSE_S)


def _show(job: RemoteJob, console: Console) -> None:
    watched, news = StatusHistory(), deque[str](maxlen=SHOWN_NEWS)
    title = job.name or job.address
    with Live(console=console, auto_refresh=False) as live:
        for status in statuses(job):
            news += map(_now, watched.take(status, time.monotonic()))
            live.update(top_view(watched, title, news, console), refresh=True)
    say(watched.end)


def _write_lines(job: RemoteJob) -> None:
    watched = StatusHistory()
    for status in statuses(job):
        for text in watched.take(status, time.monotonic()):
            say(_now(text))
        if status is not None:
            say(_now(line(status)))
    say(_now(watched.end))


def _now(text: str) -> str:
    return f"{datetime.now():%H:%M:%S}  {text}"
