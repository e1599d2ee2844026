"""Training runs that a benchmark times or looks into, and the options that describe one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from bench.classifier import DATA, RULES, make_job
from bench.cluster import Look, Plan, train
from bench.jobs import description
from bench.options import batch_size_option, data_option
from zmqtrain.local.processes import LocalCluster
from zmqtrain.observe.summary import Summary

Command = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Training:
    """A classifier, and the cluster that trains it; the fields are those of the options."""

    job: str
    hidden: int
    batch_size: int
    rule: str
    ps: int
    workers: int
    steps: int
    data: Path | None

    def run(self, look: Look, lane: str, **overrides: str) -> Summary:
        """Train with the fields ``overrides`` of the job replaced.

        Raises:
            ClickException: the run failed or was stopped; the text says how.
        """
        plan = Plan(
            LocalCluster(ps=self.ps, workers=self.workers),
            description(make_job, **self.arguments),
            overrides={**self.overrides, **overrides},
            flags={"lane": lane},
        )
        return train(plan, look)

    @property
    def arguments(self) -> dict[str, Any]:
        """Those that the job is made of."""
        return {"job": self.job, "hidden": self.hidden, "rule": self.rule}

    @property
    def overrides(self) -> dict[str, Any]:
        """What is replaced in the job that was made."""
        data = {} if self.data is None else {"data": str(self.data.absolute())}
        return {"steps": self.steps, "batch_size": self.batch_size, **data}

    @property
    def row(self) -> dict[str, Any]:
        """What of it a row of results tells."""
        return {name: value for name, value in asdict(self).items() if name != "data"}


def training_options(*, job: str, steps: int) -> Callable[[Command], Command]:
    """Return a decorator that gives a command an option for each field of :class:`Training`."""
    options = (
        click.option("--job", type=click.Choice(list(DATA)), default=job),
        click.option(
            "--hidden",
            type=click.IntRange(0),
            default=100,
            help="units of the hidden layer; 0: a linear softmax model",
        ),
        batch_size_option,
        click.option("--ps", type=click.IntRange(0, 64), default=1),
        click.option("--workers", type=click.IntRange(1, 256), default=2),
        click.option("--rule", type=click.Choice(list(RULES)), default="adam"),
        click.option("--steps", type=click.IntRange(1), default=steps),
        data_option,
    )

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate
