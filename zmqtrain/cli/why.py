"""`zmqtrain why`: who waits for whom in a running job."""

from __future__ import annotations

from dataclasses import asdict

import click
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from zmqtrain.cli.output import cell, duration, show, show_json, table
from zmqtrain.cli.remote import RemoteJob, about_a_job
from zmqtrain.wire.messages import Status, TaskStatus, Wait

PASSING_S = 0.5  # a shorter wait is how training goes: a push on its way, a step about to end
ABSENT = ("silent", "left")


@click.command("why")
@about_a_job
@click.option("--all", "show_all", is_flag=True, help="show the shortest waits, too")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object, with every wait")
def why_command(job: RemoteJob, *, show_all: bool, as_json: bool) -> None:
    """Say who waits for whom in a running job.

    A line for each wait: since when, until when, and because of what. Tasks that
    are silent or have left are named as well.

    \b
    Examples:
      zmqtrain why                          # the one job on this host
      zmqtrain why --all                    # why is it slow?
      zmqtrain why --ps host:2222 --json | jq .waits
    """
    status = job.status()
    if as_json:
        show_json(why_json(status))
    else:
        show(why_view(status, show_all=show_all))


def why_view(status: Status, *, show_all: bool = False) -> RenderableType:
    """Return the waits, the longest first, and the absent tasks for a person."""
    waits = sorted(status.waits, key=lambda wait: wait.since_s, reverse=True)
    # Before the job begins every wait is of interest.
    is_all = show_all or not status.initialised
    shown = [wait for wait in waits if is_all or wait.since_s >= PASSING_S]
    parts: list[RenderableType] = [*map(cell, _news(status))]
    parts.append(_waits(shown) if shown else Text("nobody waits"))
    if passing := len(waits) - len(shown):
        noun = "wait" if passing == 1 else "waits"
        limit = duration(PASSING_S)
        parts.append(cell(f"{passing} {noun} of less than {limit} in passing; see --all", "dim"))
    if absent := _absent(status):
        parts += [Text(), _absentees(absent)]
    return Group(*parts)


def why_json(status: Status) -> dict[str, object]:
    """Return waits, absent tasks and what ends or changes the job for a script."""
    return {
        "waits": [asdict(wait) for wait in status.waits],
        "absent": [asdict(task) for task in _absent(status)],
        "stop": status.stop,
        "failure": status.failure,
        "switching": status.switching,
    }


def _news(status: Status) -> list[str]:
    news = []
    if status.failure:
        news.append(f"the job ends in failure: {status.failure}")
    if status.stop:
        news.append(f"the job needs no more gradients: {status.stop}")
    if status.switching:
        news.append(f"the policy changes to {status.switching} once no worker computes")
    return news


def _waits(waits: list[Wait]) -> Table:
    result = table(
        "who",
        "waits for",
        "since",
        "until",
        "because",
        right=("since",),
        folded=("waits for", "because"),
    )
    for wait in waits:
        until = "it is given up" if wait.until_s is None else f"in {duration(wait.until_s)}"
        result.add_row(
            *map(cell, (wait.owner, wait.peer, duration(wait.since_s), until, wait.reason))
        )
    return result


def _absentees(tasks: list[TaskStatus]) -> Table:
    result = table("absent", "state", "last heard", "process", right=("last heard",))
    for task in tasks:
        heard = f"{duration(task.silent_s)} ago"
        result.add_row(*map(cell, (task.task, task.state, heard, task.process)))
    return result


def _absent(status: Status) -> list[TaskStatus]:
    return [task for task in status.tasks if task.state in ABSENT]
