"""`zmqtrain logs`: the logs of a submitted job, of one task or of all."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence

import click

from zmqtrain.clusters.engine import Engine
from zmqtrain.clusters.engines import engine_of
from zmqtrain.clusters.submitted import Submitted, submitted_job
from zmqtrain.config.cluster import Role, Task
from zmqtrain.errors import ConfigError, PeerLostError, ZmqTrainError
from zmqtrain.observe.logs import line_as_json, line_as_text

MOST_FOLLOWED = 64
"""Tasks that are followed at once: each takes a program and a connection."""

WAIT_S = 3.0
COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "bright_red")

Show = Callable[[Task, str], None]


@click.command("logs")
@click.argument("name")
@click.argument("tasks", metavar="[TASK]...", nargs=-1)
@click.option("-f", "--follow", is_flag=True, help="go on until Ctrl-C or the end of the job")
@click.option(
    "-p", "--previous", is_flag=True, help="Kubernetes: of earlier lives of the tasks instead"
)
@click.option("--json", "as_json", is_flag=True, help="print each line as a JSON object")
def logs_command(
    name: str, tasks: tuple[str, ...], *, follow: bool, previous: bool, as_json: bool
) -> None:
    """Print the logs of a submitted job.

    TASK is chief, ps=0, worker=3; without it all tasks are shown, with the name of the task before
    each line. They can be shown after the end, too, as long as the engine has them. On Kubernetes a
    log is that of one life of its task; elsewhere it has all lives.

    \b
    Examples:
      zmqtrain logs digits-x7k2 -f
      zmqtrain logs digits-x7k2 worker=3
      zmqtrain logs digits-x7k2 ps=0 --previous
      zmqtrain logs digits-x7k2 --json | jq -r 'select(.level == "ERROR") | .task'
    """
    chosen = list(dict.fromkeys(map(_task, tasks)))
    job = submitted_job(name)
    engine = engine_of(job)
    if previous and engine.logs_hold_all_lives:
        raise ConfigError(
            f"--previous is given, but on {job.engine} the log of a task has all of its lives; "
            "leave it out"
        )
    if previous and follow:
        raise ConfigError("--previous and --follow are both given; expected one; leave one out")
    shown = chosen or job.tasks
    show = _as_json if as_json else _prefixed(shown)
    with contextlib.suppress(KeyboardInterrupt):
        if len(chosen) == 1 and not as_json:
            engine.logs(job, chosen[0], _write, follow=follow, previous=previous)
        elif follow:
            _follow(engine, job, shown, show)
        else:
            _show_all(engine, job, shown, show, previous=previous)


class Lines:
    """Shows the lines of a task's log, which comes in pieces."""

    def __init__(self, task: Task, show: Show) -> None:
        self._task, self._show = task, show
        self._rest = b""
        self.has_begun = False

    def add(self, chunk: bytes) -> None:
        self.has_begun = True
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            self._show(self._task, line.decode(errors="replace"))

    def end(self) -> None:
        """Show a last line that has no end."""
        if self._rest:
            self.add(b"\n")


def _show_all(
    engine: Engine, job: Submitted, tasks: Sequence[Task], show: Show, *, previous: bool
) -> None:
    """Show one log after the other.

    Raises:
        PeerLostError: no task has one.
    """
    missing: list[PeerLostError] = []
    for task in tasks:
        lines = Lines(task, show)
        try:
            engine.logs(job, task, lines.add, follow=False, previous=previous)
        except PeerLostError as error:
            missing.append(error)
            _tell(task, error)
        lines.end()
    if len(missing) == len(tasks):
        raise missing[-1]


def _follow(engine: Engine, job: Submitted, tasks: Sequence[Task], show: Show) -> None:
    """Show the logs of all tasks as they grow, until the job is over."""
    if len(tasks) > MOST_FOLLOWED:
        raise ConfigError(
            f"{job.name} has {len(tasks)} tasks; expected at most {MOST_FOLLOWED} to follow; name "
            "some of them, such as chief worker=0"
        )
    # Daemons: Ctrl-C ends this process without waiting for them.
    threads = [
        threading.Thread(target=_follow_task, args=(engine, job, task, show), daemon=True)
        for task in tasks
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _follow_task(engine: Engine, job: Submitted, task: Task, show: Show) -> None:
    """Show a log as it grows; wait for a task that has not started."""
    lines, told = Lines(task, show), ""
    while True:
        try:
            engine.logs(job, task, lines.add, follow=True)
            break
        except ZmqTrainError as error:
            if str(error) != told:
                told = str(error)
                _tell(task, error)
            if lines.has_begun or not isinstance(error, PeerLostError) or engine.outcome(job):
                break
            time.sleep(WAIT_S)
    lines.end()


def _prefixed(tasks: Sequence[Task]) -> Show:
    width = max(len(str(task)) for task in tasks)
    colours = {task: COLOURS[place % len(COLOURS)] for place, task in enumerate(tasks)}

    def show(task: Task, line: str) -> None:
        name = click.style(f"{task!s:<{width}} |", fg=colours[task])
        click.echo(f"{name} {line_as_text(line)}")

    return show


def _as_json(task: Task, line: str) -> None:
    click.echo(line_as_json(str(task), line))


def _tell(task: Task, error: ZmqTrainError) -> None:
    text = str(error)
    click.echo(text if str(task) in text else f"{task}: {text}", err=True)


def _write(chunk: bytes) -> None:
    sys.stdout.buffer.write(chunk)
    sys.stdout.flush()


def _task(text: str) -> Task:
    role, equals, index = text.partition("=")
    if role not in set(Role) or (equals and not re.fullmatch("[0-9]{1,9}", index)):
        raise ConfigError(f"TASK is {text!r}; expected one such as chief, ps=0 or worker=3")
    return Task(Role(role), int(index or 0))
