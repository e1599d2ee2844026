"""A local cluster of processes that is looked at while it trains.

The cluster is what `zmqtrain run` starts: the chief in this process, ps and workers as processes of
their own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import click
import uvloop

from bench.jobs import REFERENCE, VARIABLE, job_of
from zmqtrain.compute.threads import limit_threads
from zmqtrain.config.cluster import Task
from zmqtrain.config.job_file import load_job
from zmqtrain.config.options import flags_of
from zmqtrain.errors import ZmqTrainError
from zmqtrain.hosting.signals import restored
from zmqtrain.local.processes import LocalCluster, run_processes
from zmqtrain.observe.logs import setup_logging
from zmqtrain.observe.summary import Summary
from zmqtrain.protocol.status import Status

Look = Callable[[Status], None]
"""Called a few times a second while a run goes on, and once when its last step is done: every task
is still there then, and stays as it is until the call returns."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The job and the cluster of one run.

    ``job``: the :func:`~bench.jobs.description` of a job, or else ``reference``: a file that has
    it. ``overrides`` are fields of the job.
    """

    cluster: LocalCluster
    job: str = ""
    reference: str = REFERENCE
    overrides: Mapping[str, Any] = field(default_factory=dict)


def train(plan: Plan, look: Look = lambda status: None) -> Summary:
    """Run a job to its end.

    Raises:
        ClickException: it failed or was stopped; the text says how.
    """
    setup_logging("chief 0", "warning")
    limit_threads(plan.cluster.threads)
    flags = [*flags_of(plan.overrides), "--log-level", "warning"]
    os.environ[VARIABLE] = plan.job  # of the processes of this run
    try:
        with restored():
            job = job_of(plan.job) if plan.job else load_job(plan.reference)
            job = job.with_overrides(**plan.overrides)
            running = run_processes(plan.reference, job, plan.cluster, flags, look, _show_output)
            summary = uvloop.run(running)
    except ZmqTrainError as error:
        raise click.ClickException(str(error)) from None
    if summary.exit_code:
        raise click.ClickException(f"the run ended early: {summary.ended}")
    return summary


def _show_output(task: Task, line: str) -> None:
    click.echo(f"{task} | {line}", err=True)


def pid_of(status: Status, task: str) -> int:
    """Return the process of a task, such as "ps 0", from the ``host:pid`` that it joined with."""
    (process,) = (one.process for one in status.tasks if one.task == task)
    return int(process.rpartition(":")[2])
