"""Training runs that a benchmark looks into, and the options that describe one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from bench.classifier import DATA, RULES, make_job
from bench.cluster import Look, Plan, train
from zmqtrain.processes import LocalCluster
from zmqtrain.summary import Summary

Command = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Training:
    """A classifier, and the cluster that trains it; the fields are those of the options."""

    job: str
    hidden: int
    batch_size: int
    rule: str
    steps: int
    data: Path | None
    ps: int
    workers: int

    def run(self, look: Look, *, lane: str, **overrides: str) -> Summary:
        """Train with the fields ``overrides`` of the job replaced.

        Raises:
            ClickException: the run failed or was stopped; the text says how.
        """
        settings = {
            "BENCH_JOB": self.job,
            "BENCH_HIDDEN": str(self.hidden),
            "BENCH_RULE": self.rule,
        }
        sizes = {"steps": self.steps, "batch_size": self.batch_size}
        data = {} if self.data is None else {"data": str(self.data.absolute())}
        plan = Plan(
            reference="bench.train_job",
            settings=settings,
            make=partial(make_job, self.job, self.hidden, self.rule),
            cluster=LocalCluster(ps=self.ps, workers=self.workers),
            overrides={**sizes, **data, **overrides},
            flags={"lane": lane},
        )
        return train(plan, look)

    @property
    def row(self) -> dict[str, Any]:
        """What of it a row of results tells."""
        return {
            "job": self.job,
            "hidden": self.hidden,
            "batch_size": self.batch_size,
            "rule": self.rule,
            "ps": self.ps,
            "workers": self.workers,
            "steps": self.steps,
        }


def training_options(*, job: str, steps: int) -> Callable[[Command], Command]:
    """Return a decorator that gives a command an option for each field of :class:`Training`."""
    options = (
        click.option("--job", type=click.Choice(list(DATA)), default=job, show_default=True),
        click.option(
            "--hidden",
            type=click.IntRange(0),
            default=100,
            show_default=True,
            help="units of the hidden layer; 0: a linear softmax model",
        ),
        click.option("--batch-size", type=click.IntRange(1), default=100, show_default=True),
        click.option("--ps", type=click.IntRange(1, 64), default=1, show_default=True),
        click.option("--workers", type=click.IntRange(1, 256), default=2, show_default=True),
        click.option("--rule", type=click.Choice(list(RULES)), default="adam", show_default=True),
        click.option("--steps", type=click.IntRange(1), default=steps, show_default=True),
        click.option(
            "--data",
            type=click.Path(file_okay=False, path_type=Path),
            help="directory with MNIST's files",
        ),
    )

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate
