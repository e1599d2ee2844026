"""`zmqtrain status` and `zmqtrain why`: the state of a running job, and what its tasks wait for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from zmqtrain.chief.job_view import SHORT_S, JobView, wait_row
from zmqtrain.cli.ended import EndedJob
from zmqtrain.cli.output import cell, show_result, table, task_table
from zmqtrain.cli.remote import RemoteJob, about_a_job
from zmqtrain.cli.unanswered import reported_waits
from zmqtrain.clusters.engines import engine_of
from zmqtrain.clusters.submitted import FAILED
from zmqtrain.config.commands import command
from zmqtrain.errors import PeerLostError
from zmqtrain.protocol.status import Status, Wait
from zmqtrain.units import counted, duration, shortened

if TYPE_CHECKING:
    from zmqtrain.clusters.engine import Reason

COLUMNS = (
    "task", "state", "step", "behind", "loss", "holds", "silent", "joined", "lane", "process",
    "metrics",
)  # fmt: skip
SHOWN_NAMES = 4  # of tasks that wait for the same reason


@command("status")
@about_a_job
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def status_command(job: RemoteJob, *, as_json: bool) -> None:
    """Show the state, the figures and the tasks of a running job.

    \b
    Examples:
      zmqtrain status                       # the one job on this host
      zmqtrain status --ps host:2222        # a job on another host
      zmqtrain status digits-x7k2           # a submitted job, also once it has ended
      zmqtrain status --logdir runs/net     # how did the last run there end?
      zmqtrain status --json | jq .steps_per_second

    "behind" is the distance in steps to the first worker, as the policy counts them; "holds" is a
    ps's part of the parameters, a worker's batches, or the chief's newest checkpoint; "silent" is
    the time since the task's last message; "lane" is how its tensors reach the ps. A narrow
    terminal hides the last columns. Staleness counts updates by all workers between a gradient's
    pull and its push; the S of bounded-staleness counts a worker's own steps. zmqtrain top watches
    a job. Given the name or the logdir of a job that has ended, both print how it ended.
    """
    if job.ended is not None:
        show_ended(job.ended, as_json=as_json)
        return
    status = job.status()
    view = status_view(JobView.of(status), f"{job.name or 'job'} at {job.address}")
    show_result(status_json(status, job), view, as_json=as_json)


def status_view(view: JobView, title: str) -> RenderableType:
    grid = _grid(view.figures(), failed=view.status.failure != "")
    tasks = task_table((row.texts for row in view.tasks()), COLUMNS)
    return Group(cell(title, "bold"), grid, Text(), tasks)


def show_ended(job: EndedJob, *, as_json: bool) -> None:
    view = Group(cell(job.title, "bold"), _grid(job.figures(), failed=job.state == FAILED))
    show_result(job.json(), view, as_json=as_json)


def _grid(figures: Mapping[str, str], *, failed: bool) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    for name, text in figures.items():
        style = "red" if failed and name == "state" else ""
        grid.add_row(cell(f"  {name}", "dim"), cell(text, style))
    return grid


def status_json(status: Status, job: RemoteJob) -> dict[str, object]:
    """Return the status for a script: every field of the message, and the job's name."""
    return {"job": job.name or None, "ps": job.address, **asdict(status)}


@command("why")
@about_a_job
@click.option("--all", "show_all", is_flag=True, help="show short waits, too")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object, with every wait")
def why_command(job: RemoteJob, *, show_all: bool, as_json: bool) -> None:
    """Show which task of a running job waits for which.

    First come the tasks that are silent or have left, and how many tasks wait for them. Then comes
    a line for each wait: since when, until when, and why. For a submitted job the engine's reasons
    come before them: why a task has not started. If ps 0 does not answer, the command asks the
    chief and the workers of this host for their own waits.

    \b
    Examples:
      zmqtrain why                          # the one job on this host
      zmqtrain why --all                    # why is it slow?
      zmqtrain why --ps host:2222 --json | jq .waits
      zmqtrain why digits-x7k2              # a submitted job
    """
    is_there = job.submitted is not None and not job.submitted.stopped_at
    reasons = engine_of(job.submitted).reasons(job.submitted) if job.submitted and is_there else []
    view, unreachable, waits = None, job.unreachable, list[Wait]()
    if unreachable is None and job.ended is None:
        try:
            view = JobView.of(job.status())
        except PeerLostError as error:
            unreachable, waits = error, reported_waits(job.chief_metrics)
    if unreachable is not None and not (reasons or waits or job.ended):
        raise unreachable
    result: dict[str, object] = {"waits": [*map(asdict, waits)]}
    result |= {} if view is None else view.why_json()
    result |= {"unreachable": str(unreachable), "outcome": ""} if unreachable else {}
    result |= {} if job.ended is None else job.ended.json()
    result |= {} if job.submitted is None else {"engine": [*map(asdict, reasons)]}
    parts = _lines(reasons)
    if view is not None:
        parts.append(why_view(view, show_all=show_all))
    else:
        parts.append(cell(unreachable if job.ended is None else job.ended.sentence()))
        parts += [_waits(waits)] if waits else []
    show_result(result, Group(*parts), as_json=as_json)


def _lines(reasons: Sequence[Reason]) -> list[RenderableType]:
    """Return a line for each text among the reasons, with the tasks and objects that have it."""
    found: dict[str, list[str]] = {}
    for reason in reasons:
        found.setdefault(reason.text, []).append(reason.what)
    return [cell(f"{shortened(names, SHOWN_NAMES)}: {text}") for text, names in found.items()]


def why_view(view: JobView, *, show_all: bool = False) -> RenderableType:
    """Return the waits, the longest first, and the absent tasks for a person."""
    shown = view.waits(0.0 if show_all else SHORT_S)
    parts: list[RenderableType] = [cell(text) for text in view.changes()]
    parts += [cell(text, "bold") for text in view.absences()]
    parts.append(_waits(shown) if shown else Text("no task waits"))
    if hidden := len(view.status.waits) - len(shown):
        waits = counted(hidden, "wait")
        parts.append(cell(f"{waits} shorter than {duration(SHORT_S)} hidden; use --all", "dim"))
    return Group(*parts)


def _waits(waits: Sequence[Wait]) -> RenderableType:
    headings = ("who", "waits for", "since", "until", "because")
    folded = ["waits for", "because"]
    return table(*headings, rows=map(wait_row, waits), right=["since"], folded=folded)
