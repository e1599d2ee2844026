"""`zmqtrain status`: tasks, figures and state of a running job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

import click
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from zmqtrain.chief.job_view import JobView
from zmqtrain.cli.ended import EndedJob
from zmqtrain.cli.output import cell, show_result, task_table
from zmqtrain.cli.remote import RemoteJob, about_a_job
from zmqtrain.clusters.submitted import FAILED
from zmqtrain.config.commands import command
from zmqtrain.protocol.status import Status

COLUMNS = (
    "task", "state", "step", "behind", "loss", "holds", "silent", "joined", "lane", "process",
    "metrics",
)  # fmt: skip


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
    view = Group(cell(job.name, "bold"), _grid(job.figures(), failed=job.state == FAILED))
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
