"""`zmqtrain logs`: the logs of a submitted job, of one task or of all."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Callable, Sequence

import click

from zmqtrain.cli.ended import ended_job
from zmqtrain.clusters.engine import Engine
from zmqtrain.clusters.engines import engine_of
from zmqtrain.clusters.programs import in_daemons
from zmqtrain.clusters.submitted import Submitted, submitted_job
from zmqtrain.config.cluster import Role, Task
from zmqtrain.config.commands import command
from zmqtrain.errors import ConfigError, NotRunningError, PeerLostError, ZmqTrainError
from zmqtrain.observe.logs import line_as_json, line_as_text

MOST_FOLLOWED = 64
"""Tasks that are followed at once: each takes a program and a connection."""

WAIT_S = 3.0
COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "bright_red")

Show = Callable[[Task, str], None]
Failure = ZmqTrainError | None


@command("logs")
@click.argument("name")
@click.argument("tasks", metavar="[TASK]...", nargs=-1)
@click.option(
    "-f", "--follow", is_flag=True, help="keep printing until Ctrl-C or the end of the job"
)
@click.option(
    "-p", "--previous", is_flag=True, help="Kubernetes: print the logs of earlier lives instead"
)
@click.option("--json", "as_json", is_flag=True, help="print each line as a JSON object")
def logs_command(
    name: str, tasks: tuple[str, ...], *, follow: bool, previous: bool, as_json: bool
) -> None:
    """Print the logs of a submitted job.

    TASK is one such as chief, ps=0 or worker=3. Without it the logs of all tasks are shown, with
    the name of the task before each line. After the end they are shown as long as the engine has
    them. On Kubernetes a log covers one life of its task; elsewhere it covers all.

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
    if len(chosen) == 1 and not as_json:
        try:
            engine.logs(job, chosen[0], _write, follow=follow, previous=previous)
        except KeyboardInterrupt:
            return
        except ZmqTrainError as error:
            raise _without_log(job, error) from None
        return
    shown = chosen or job.tasks
    if follow and len(shown) > MOST_FOLLOWED:
        raise ConfigError(
            f"{job.name} has {len(shown)} tasks; expected at most {MOST_FOLLOWED} to follow; name "
            "some of them, such as chief worker=0"
        )
    logs = [Log(engine, job, task, _as_json if as_json else _prefixed(shown)) for task in shown]
    with contextlib.suppress(KeyboardInterrupt):
        if follow:
            failures = []
            in_daemons(lambda log: failures.append(log.follow()), logs)
        else:
            failures = [log.show(previous=previous) for log in logs]
        if failures[-1] is not None and all(failures):
            raise _without_log(job, failures[-1])


def _without_log(job: Submitted, error: ZmqTrainError) -> ZmqTrainError:
    """Return the error to show if no log can be shown: that the job is over, if it is."""
    ended = None
    with contextlib.suppress(ZmqTrainError):  # the engine's first error says more
        ended = ended_job(job)
    if ended is None:
        return error
    gone = "its log was removed with it" if job.stopped_at else error
    return NotRunningError(f"{ended.sentence()}; {gone}")


class Log:
    """The log of a task, whose lines are shown as they come."""

    def __init__(self, engine: Engine, job: Submitted, task: Task, show: Show) -> None:
        self._engine, self._job, self._task, self._show = engine, job, task, show
        self._rest = b""
        self._has_begun = False

    def follow(self) -> Failure:
        """Show it as it grows; wait for a task that has not started, until the job is over.

        Return the error if there is one.
        """
        told = ""
        while (error := self.show(follow=True, unless=told)) is not None:
            is_lost = self._has_begun or not isinstance(error, PeerLostError)
            if is_lost or self._is_over():
                break
            told = str(error)
            time.sleep(WAIT_S)
        return error

    def _is_over(self) -> bool:
        try:
            return ended_job(self._job) is not None
        except PeerLostError:  # its engine does not answer now
            return False
        except ZmqTrainError:
            return True

    def show(self, *, follow: bool = False, previous: bool = False, unless: str = "") -> Failure:
        """Show it; return the error if there is one.

        It is printed unless it is ``unless``, or the job was stopped, which often removes all logs.
        """
        failure = None
        try:
            self._engine.logs(self._job, self._task, self._add, follow=follow, previous=previous)
        except ZmqTrainError as error:
            failure = error
            named = "" if str(self._task) in str(error) else f"{self._task}: "
            if str(error) != unless and not self._job.stopped_at:
                click.echo(f"{named}{error}", err=True)
        if self._rest:
            self._add(b"\n")
        return failure

    def _add(self, chunk: bytes) -> None:
        self._has_begun = True
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            self._show(self._task, line.decode(errors="replace"))


def _prefixed(tasks: Sequence[Task]) -> Show:
    width = max(len(str(task)) for task in tasks)
    colours = {task: COLOURS[place % len(COLOURS)] for place, task in enumerate(tasks)}

    def show(task: Task, line: str) -> None:
        name = click.style(f"{task!s:<{width}} |", fg=colours[task])
        click.echo(f"{name} {line_as_text(line)}")

    return show


def _as_json(task: Task, line: str) -> None:
    click.echo(line_as_json(str(task), line))


def _write(chunk: bytes) -> None:
    sys.stdout.buffer.write(chunk)
    sys.stdout.flush()


def _task(text: str) -> Task:
    role, equals, index = text.partition("=")
    if role not in set(Role) or (equals and not re.fullmatch("[0-9]{1,9}", index)):
        raise ConfigError(f"TASK is {text!r}; expected one such as chief, ps=0 or worker=3")
    return Task(Role(role), int(index or 0))
