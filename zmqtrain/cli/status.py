"""`zmqtrain status`: tasks, figures and state of a running job."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from zmqtrain.cli.output import (
    NOTHING,
    FirstThatFits,
    cell,
    data_size,
    duration,
    rate,
    show,
    show_json,
    table,
)
from zmqtrain.cli.remote import RemoteJob, about_a_job
from zmqtrain.config.cluster import Role
from zmqtrain.errors import PeerLostError
from zmqtrain.wire.messages import Status, TaskStatus

REFRESH_S = 1.0
SHOWN_LEASES = 2
HIDEABLE = 7  # columns
COLUMNS = (
    "task", "state", "step", "behind", "loss", "holds", "silent", "joined", "lane", "process",
    "metrics",
)  # fmt: skip
STATE_STYLES = {"silent": "yellow", "left": "yellow", "waiting": "cyan"}


@click.command("status")
@about_a_job
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
@click.option(
    "--watch", is_flag=True, help="update every second, until Ctrl-C or the end of the job"
)
def status_command(job: RemoteJob, *, as_json: bool, watch: bool) -> None:
    """Show the state, the figures and the tasks of a running job.

    \b
    Examples:
      zmqtrain status                       # the one job on this host
      zmqtrain status --watch
      zmqtrain status --ps host:2222        # a job on another host
      zmqtrain status digits-x7k2           # a submitted job
      zmqtrain status --json | jq .steps_per_second

    "behind" is the distance in steps to the worker with most steps; "holds" is a ps's part of the
    parameters, a worker's batches, or the chief's newest checkpoint; "silent" is the time since the
    task's last message; "lane" is how its tensors reach the ps. A narrow terminal hides the last
    columns. Staleness counts updates by all workers between a gradient's pull and its push; the S
    of bounded-staleness counts a worker's own steps.
    """
    if watch:
        _watch(job, as_json)
    else:
        _print(job, job.status(), as_json)


def updates(job: RemoteJob) -> Iterator[Status]:
    """Yield the job's status now, then once a second until the job ends."""
    status = job.status()
    yield status
    while not (status.stop or status.failure):
        try:
            status = job.status(status.event, REFRESH_S)
        except PeerLostError:
            if job.has_ended():
                return
            raise
        yield status


def status_view(status: Status, title: str) -> RenderableType:
    """Return the status for a person."""
    return Group(cell(title, "bold"), _figures(status), Text(), _tasks(status.tasks))


def status_json(status: Status, job: RemoteJob) -> dict[str, object]:
    """Return the status for a script: every field of the message, and the job's name."""
    return {"job": job.name or None, "ps": job.address, **asdict(status)}


def _print(job: RemoteJob, status: Status, as_json: bool) -> None:
    if as_json:
        show_json(status_json(status, job))
    else:
        show(status_view(status, _title(job)))


def _watch(job: RemoteJob, as_json: bool) -> None:
    console = Console()
    status = None
    with contextlib.suppress(KeyboardInterrupt):
        if as_json or not console.is_terminal:
            for status in updates(job):
                _print(job, status, as_json)
                if not as_json:
                    click.echo()
        else:
            with Live(console=console, auto_refresh=False) as live:
                for status in updates(job):
                    live.update(status_view(status, _title(job)), refresh=True)
        if not as_json and status is not None and not (status.stop or status.failure):
            click.echo("the job has ended")


def _title(job: RemoteJob) -> str:
    return f"{job.name} at {job.address}" if job.name else f"job at {job.address}"


def _figures(status: Status) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    change = f", changes to {status.switching} at the next barrier" if status.switching else ""
    rows = {
        "state": cell(_state(status), "red" if status.failure else ""),
        "step": cell(_progress(status)),
        "policy": cell(status.policy + change),
        "loss": cell(f"{_loss(status.loss)} at the last push"),
        "examples": cell(status.examples),
        "pushes": cell(", ".join(f"{count} {what}" for what, count in status.pushes.items())),
        "staleness": cell(_staleness(status.staleness)),
    }
    for name, text in rows.items():
        grid.add_row(cell(f"  {name}", "dim"), text)
    return grid


def _state(status: Status) -> str:
    if status.failure:
        return f"failed: {status.failure}"
    if status.stop:
        return f"done: {status.stop}"
    if not status.initialised:
        return "waiting for the chief to begin the job"
    saving = ", checkpoint requested" if status.save_wanted else ""
    stopping = ", stop requested" if status.stop_wanted else ""
    return f"training for {duration(status.seconds)}{saving}{stopping}"


def _progress(status: Status) -> str:
    share = f" of {status.steps} ({100 * status.step / status.steps:.1f} %)" if status.steps else ""
    parts = [f"{status.step}{share}"]
    if status.steps_per_second > 0:
        parts.append(f"{rate(status.steps_per_second)} steps/s")
        if status.step < status.steps and not status.failure:
            remaining_s = (status.steps - status.step) / status.steps_per_second
            parts.append(f"about {duration(remaining_s)} left")
    return ", ".join(parts)


def _staleness(figures: dict[str, float]) -> str:
    rounded = (
        f"{name} {value:.2f}" if name == "mean" else f"{name} {value:.0f}"
        for name, value in figures.items()
    )
    return f"{', '.join(rounded)} versions"


def _tasks(tasks: tuple[TaskStatus, ...]) -> FirstThatFits:
    """Return the table of tasks; a narrow terminal hides its last columns."""
    rows = [_row(task, _fastest(tasks)) for task in tasks]
    shown = range(len(COLUMNS), len(COLUMNS) - HIDEABLE - 1, -1)
    return FirstThatFits([_table(rows, count) for count in shown])


def _table(rows: list[list[Text]], columns: int) -> Table:
    result = table(*COLUMNS[:columns], right=("step", "behind", "loss", "silent"))
    for row in rows:
        result.add_row(*row[:columns])
    return result


def _row(task: TaskStatus, fastest: int) -> list[Text]:
    return [
        cell(task.task),
        cell(task.state, STATE_STYLES.get(task.state, "")),
        *map(cell, _progress_cells(task, fastest)),
        cell(_holding(task)),
        cell(duration(task.silent_s)),
        cell(_joined(task)),
        cell(_lane(task)),
        cell(task.process),
        cell(task.metrics or NOTHING),
    ]


def _fastest(tasks: tuple[TaskStatus, ...]) -> int:
    live = [task.step for task in tasks if _is_worker(task) and task.state != "left"]
    return max(live, default=0)


def _progress_cells(task: TaskStatus, fastest: int) -> tuple[str, str, str]:
    """Return step, distance to the fastest worker, and loss; "-" where the task has none."""
    if not _is_worker(task):
        return NOTHING if _is_chief(task) else str(task.step), NOTHING, NOTHING
    behind = NOTHING if task.state == "left" else str(fastest - task.step)
    return str(task.step), behind, _loss(task.loss) if task.step else NOTHING


def _holding(task: TaskStatus) -> str:
    if task.nbytes:
        return data_size(task.nbytes)
    if _is_chief(task) and task.step:
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


def _loss(loss: float) -> str:
    return NOTHING if math.isnan(loss) else f"{loss:.4f}"


def _is_worker(task: TaskStatus) -> bool:
    return task.role == Role.WORKER


def _is_chief(task: TaskStatus) -> bool:
    return task.role == Role.CHIEF
