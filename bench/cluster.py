"""A local cluster of processes that is looked at while it trains.

The cluster is what `zmqtrain run` starts: the chief in this process, ps and workers as processes of
their own.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import click
import uvloop

from bench.jobs import variables_of
from bench.options import flags_of
from zmqtrain.compute.threads import limit_threads
from zmqtrain.config.cluster import Task
from zmqtrain.errors import ZmqTrainError
from zmqtrain.job import Job
from zmqtrain.local.processes import LocalCluster, run_processes
from zmqtrain.observe.logs import setup_logging
from zmqtrain.observe.summary import Summary
from zmqtrain.roles.signals import that_end
from zmqtrain.wire.messages import Status

Look = Callable[[Status], None]
"""Called a few times a second while a run goes on, and once when its last step is done: every task
is still there then, and stays as it is until the call returns."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run trains and with whom.

    ``make`` makes the job of these ``arguments``; ``reference`` names the module that does so in
    the other processes. ``overrides`` are fields of the job, ``flags`` options of the tasks, such
    as their lane.
    """

    reference: str
    make: Callable[..., Job]
    arguments: Mapping[str, Any]
    cluster: LocalCluster
    overrides: Mapping[str, Any] = field(default_factory=dict)
    flags: Mapping[str, Any] = field(default_factory=dict)


def train(plan: Plan, look: Look) -> Summary:
    """Run a job to its end.

    Raises:
        ClickException: it failed or was stopped; the text says how.
    """
    setup_logging("chief 0", "warning")
    limit_threads(plan.cluster.threads)
    flags = flags_of({**plan.overrides, **plan.flags})
    flags += ["--log-level", "warning"]
    try:
        with _variables(variables_of(plan.arguments)), _signals_restored():
            job = plan.make(**plan.arguments).with_overrides(**plan.overrides)
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


@contextmanager
def _variables(settings: Mapping[str, str]) -> Iterator[None]:
    """Have these variables in the environment, which the processes of a run inherit."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _signals_restored() -> Iterator[None]:
    """Undo what a run does to signals: the end of one ignores them, and here more may follow."""
    before = {number: signal.getsignal(number) for number in that_end()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
