"""`zmqtrain jobs`: what was submitted, and what runs on this host."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

import click
from rich.console import Group, RenderableType

from zmqtrain.cli.ended import state_of
from zmqtrain.cli.output import cell, show_result, table
from zmqtrain.cli.remote import ways_to
from zmqtrain.clusters.programs import in_daemons
from zmqtrain.clusters.submitted import Submitted, submitted_jobs
from zmqtrain.config.commands import command
from zmqtrain.config.run_file import RunningJob, running_jobs
from zmqtrain.errors import ZmqTrainError
from zmqtrain.units import duration

SHOWN_STATE = 120  # letters of a state in a table, or one job could fill the screen
ANSWER_S = 15.0
"""How long the engines may take to answer."""


@command("jobs")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def jobs_command(*, as_json: bool) -> None:
    """List submitted jobs, and those that run on this host.

    \b
    Examples:
      zmqtrain jobs
      zmqtrain jobs --json | jq -r '.jobs[] | select(.state != "completed") | .name'
    """
    jobs, running = submitted_jobs(), running_jobs()
    states = states_of(jobs, state_of)
    known = [asdict(job) | {"state": states[job.name]} for job in jobs]
    views = [view for view in (_submitted(jobs, states), _running(running)) if view is not None]
    none = cell("no job was submitted, and none runs on this host")
    both = {"jobs": known, "running": [asdict(job) for job in running]}
    show_result(both, Group(*views) if views else none, as_json=as_json)


def _submitted(jobs: Sequence[Submitted], states: dict[str, str]) -> RenderableType | None:
    rows = []
    for job in jobs:
        where = "/".join(filter(None, (job.context, job.namespace)))
        state = textwrap.shorten(states[job.name], SHOWN_STATE, placeholder=" ...")
        rows.append((job.name, job.engine, where, job.job, job.ps, job.workers, state))
    headings = ("name", "engine", "where", "job", "ps", "workers", "state")
    return table(*headings, rows=rows, folded=("state",)) if rows else None


def _running(jobs: Sequence[RunningJob]) -> RenderableType | None:
    if not jobs:
        return None
    ages = [duration(int(time.time() - job.began)) if job.began else "" for job in jobs]
    rows = zip([job.job for job in jobs], ages, ways_to(jobs), strict=True)
    title = cell("jobs on this host, and the option with which other commands find them:")
    return Group(title, table("job", "age", "option", rows=rows))


def states_of(
    jobs: Sequence[Submitted], ask: Callable[[Submitted], str], limit_s: float = ANSWER_S
) -> dict[str, str]:
    """Ask for the states of all jobs at once, and return those that arrive in time, by name."""
    states = {job.name: f"unknown: no answer within {limit_s:g} s" for job in jobs}

    def note(job: Submitted) -> None:
        try:
            states[job.name] = ask(job)
        except ZmqTrainError as error:
            states[job.name] = f"unknown: {error}"

    in_daemons(note, jobs, limit_s)
    return dict(states)
