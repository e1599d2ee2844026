"""Progress for people: a bar, or lines in the log, less and less often."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import Counter

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from zmqtrain.config.cluster import Role
from zmqtrain.coordination.peers import A_WORKER
from zmqtrain.protocol.status import Status
from zmqtrain.units import measure_text

FIRST_INTERVAL_S = 2.0
LONGEST_INTERVAL_S = 60.0
LINE_INTERVAL_S = 10.0
"""The longest time between plain lines of a script whose log does not show any."""

log = logging.getLogger(__name__)


class ProgressLog:
    """Logs the status less and less often, each 60 s at last, and when live tasks change."""

    def __init__(self) -> None:
        self._next_at = 0.0
        self._interval_s = FIRST_INTERVAL_S
        self._tasks: tuple[str, ...] = ()

    def __call__(self, status: Status) -> None:
        tasks = tuple(task.task for task in status.tasks if task.state != "left")
        now = time.monotonic()
        if now >= self._next_at:
            self._next_at = now + self._interval_s
            self._interval_s = min(2 * self._interval_s, LONGEST_INTERVAL_S)
        elif tasks == self._tasks:
            return
        self._tasks = tasks
        log.info("%s", line(status))


class ProgressDisplay:
    """Shows the status as a bar on a terminal or in a notebook, else as a line now and then.

    The lines go to the log if that shows them, else as plain text to stderr.
    """

    def __init__(self, console: Console | None = None, *, with_bar: bool = True) -> None:
        """``with_bar=False``: where a bar could be, nothing is shown: others write there."""
        console = console or Console(stderr=True)
        self._console = console
        self._log = ProgressLog()
        self._bar: Progress | None = None
        can_bar = (console.is_terminal and not console.is_dumb_terminal) or console.is_jupyter
        self._interval_s = FIRST_INTERVAL_S
        self._next_at = math.inf if can_bar else time.monotonic() + FIRST_INTERVAL_S
        if can_bar and with_bar:
            text = TextColumn("{task.description}", table_column=Column(no_wrap=True))
            columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), text)
            # A refresh while nothing changes would hide what a person types to a debugger.
            self._bar = Progress(*columns, console=console, transient=True, auto_refresh=False)
            self._task = self._bar.add_task("", total=None)
            self._shown: tuple[int | None, int] | None = None

    def __call__(self, status: Status) -> None:
        if self._bar is None:
            self._show_line(status)
            return
        self._bar.start()
        total, done = shown = status.steps or None, status.step
        if shown != self._shown:
            self._shown, text = shown, _speed(status)
            self._bar.update(
                self._task, description=text, total=total, completed=done, refresh=True
            )

    def _show_line(self, status: Status) -> None:
        if log.isEnabledFor(logging.INFO):
            self._log(status)
        elif (now := time.monotonic()) >= self._next_at:
            self._next_at = now + self._interval_s
            self._interval_s = min(2 * self._interval_s, LINE_INTERVAL_S)
            with contextlib.suppress(OSError):  # a full disk or a closed pipe ends no training
                print(_steps(status), _speed(status), sep="  ", file=self._console.file, flush=True)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()


def line(status: Status) -> str:
    """Return the status in one line."""
    states = Counter(task.state for task in status.tasks if task.role == Role.WORKER)
    workers = ", ".join(f"{count} {state}" for state, count in states.items()) or _without_workers(
        status
    )
    staleness = status.staleness["mean"]
    return f"{_steps(status)}  {_speed(status)}  staleness {staleness:.2f}  workers: {workers}"


def _steps(status: Status) -> str:
    if status.steps:
        return f"step {status.step}/{status.steps}"
    return f"step {status.step}" + (f"  {status.epoch}" if status.epoch else "")


def _speed(status: Status) -> str:
    is_new = not status.seconds and math.isnan(status.loss)  # no push since ps 0 was restarted
    is_known = any(status.pushes.values()) and not is_new
    loss = measure_text(status.loss) if is_known else "-"
    speed = f"{status.steps_per_second:.0f}" if is_known else "-"
    return f"{speed} steps/s  loss {loss}"


def _without_workers(status: Status) -> str:
    """Return that no worker has joined and, while the job waits for one, when it gives up."""
    ends = [wait.until_s for wait in status.waits if wait.peer == A_WORKER]
    if not ends or ends[0] is None:
        return "none"
    return f"none has loaded the job yet; the job ends in {ends[0]:.0f} s unless one joins"
