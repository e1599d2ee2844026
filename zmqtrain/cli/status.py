"""`zmqtrain status`: tasks, figures and state of a running job."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime

import click
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from zmqtrain.cli.output import (
    NOTHING,
    FirstThatFits,
    cell,
    narrowing_table,
    show,
    show_json,
)
from zmqtrain.cli.remote import RemoteJob, about_a_job
from zmqtrain.cli.status_words import (
    STATE_STYLES,
    group_of,
    is_stalled,
    loss_of,
    remaining_of,
    state_of,
)
from zmqtrain.config.cluster import Role
from zmqtrain.protocol.status import Status, TaskStatus
from zmqtrain.units import data_size, duration, rate

SHOWN_LEASES = 2
FEWEST_COLUMNS = 4
COLUMNS = (
    "task", "state", "step", "behind", "loss", "holds", "silent", "joined", "lane", "process",
    "metrics",
)  # fmt: skip


@click.command("status")
@about_a_job
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def status_command(job: RemoteJob, *, as_json: bool) -> None:
    """Show the state, the figures and the tasks of a running job.

    \b
    Examples:
      zmqtrain status                       # the one job on this host
      zmqtrain status --ps host:2222        # a job on another host
      zmqtrain status digits-x7k2           # a submitted job
      zmqtrain status --json | jq .steps_per_second

    "behind" is the distance in steps to the first worker, as the policy counts them; "holds" is a
    ps's part of the parameters, a worker's batches, or the chief's newest checkpoint; "silent" is
    the time since the task's last message; "lane" is how its tensors reach the ps. A narrow
    terminal hides the last columns. Staleness counts updates by all workers between a gradient's
    pull and its push; the S of bounded-staleness counts a worker's own steps. zmqtrain top watches
    a job.
    """
    status = job.status()
    if as_json:
        show_json(status_json(status, job))
    else:
        show(status_view(status, f"{job.name or 'job'} at {job.address}"))


def status_view(status: Status, title: str) -> RenderableType:
    """Return the status for a person."""
    return Group(cell(title, "bold"), _figures(status), Text(), _tasks(status.tasks))


def status_json(status: Status, job: RemoteJob) -> dict[str, object]:
    """Return the status for a script: every field of the message, and the job's name."""
    return {"job": job.name or None, "ps": job.address, **asdict(status)}


def _figures(status: Status) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    change = f", changes to {status.switching} at the next barrier" if status.switching else ""
    rows = {
        "state": cell(state_of(status), "red" if status.failure else ""),
        "step": cell(_progress(status)),
        "strategy": cell(f"{status.strategy}, exchange {status.exchange}"),
        "policy": cell(status.policy + change),
        "loss": cell(f"{loss_of(status.loss)} at the last push"),
        "examples": cell(status.examples),
        "pushes": cell(", ".join(f"{count} {what}" for what, count in status.pushes.items())),
        "staleness": cell(
            "mean {mean:.2f}, p50 {p50:.0f}, p99 {p99:.0f}, max {max:.0f} versions".format(
                **status.staleness
            )
        ),
    }
    if status.group:
        rows["group"] = cell(group_of(status))
    if status.rosters:
        rows["rosters"] = cell(status.rosters)
    for name, text in rows.items():
        grid.add_row(cell(f"  {name}", "dim"), text)
    return grid


def _progress(status: Status) -> str:
    share = f" of {status.steps} ({100 * status.step / status.steps:.1f} %)" if status.steps else ""
    parts = [f"{status.step}{share}"]
    if status.steps_per_second > 0 and not is_stalled(status):
        parts.append(f"{rate(status.steps_per_second)} steps/s")
    return ", ".join(parts) + remaining_of(status)


def _tasks(tasks: tuple[TaskStatus, ...]) -> FirstThatFits:
    """Return the table of tasks; a narrow terminal hides its last columns."""
    return narrowing_table(
        COLUMNS, [*map(_row, tasks)], FEWEST_COLUMNS, ("step", "behind", "loss", "silent")
    )


def _row(task: TaskStatus) -> list[object]:
    return [
        task.task,
        cell(task.state, STATE_STYLES.get(task.state, "")),
        NOTHING if task.role == Role.CHIEF else task.step,
        NOTHING if task.behind is None else task.behind,
        loss_of(task.loss) if task.role == Role.WORKER and task.step else NOTHING,
        _holding(task),
        duration(task.silent_s),
        _joined(task),
        _lane(task),
        task.process,
        task.metrics or NOTHING,
    ]


def _holding(task: TaskStatus) -> str:
    if task.nbytes:
        return data_size(task.nbytes)
    if task.role == Role.CHIEF and task.step:
        return f"saved {task.step}"
    if not task.leases:
        return NOTHING
    shown = ", ".join(map(str, task.leases[:SHOWN_LEASES]))
    further = len(task.leases) - SHOWN_LEASES
    return shown + (f", +{further}" if further > 0 else "")


def _joined(task: TaskStatus) -> str:
    """Return when this life of a task began; its incarnation is that time in milliseconds."""
    if not task.incarnation:  # ps 0 has none: all others join it
        return NOTHING
    return datetime.fromtimestamp(task.incarnation / 1000).strftime("%a %H:%M")


def _lane(task: TaskStatus) -> str:
    """Return a worker's lane to every ps, or the list of lanes if they differ."""
    different = set(task.lanes.split(","))
    return (task.lanes if len(different) > 1 else task.lanes.partition(",")[0]) or NOTHING
