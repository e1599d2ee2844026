"""Global steps a second of whole processes; and the training runs that other benchmarks look into.

The job classifies handwritten digits, by MNIST's usual small networks.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from bench.cluster import Look, Plan, train
from bench.jobs import description
from bench.options import batch_size_option, data_option, json_option, runs_option
from bench.output import report
from bench.workload import CLASSES
from zmqtrain import Job
from zmqtrain.data import Digits, Mnist
from zmqtrain.local.processes import LocalCluster
from zmqtrain.models import MLP
from zmqtrain.observe.summary import Summary
from zmqtrain.optim import SGD, Adam

DATA = {"mnist": (Mnist(), 784), "digits": (Digits(), 64)}  # and how many features
RULES = {"sgd": SGD(learning_rate=0.1), "adam": Adam(learning_rate=0.001)}
COLUMNS = (
    *("policy", "ps", "workers", "global_step", "seconds", "steps_per_second"),
    *("loss", "accuracy"),
)

Command = Callable[..., Any]


def make_job(job: str, hidden: int, rule: str) -> Job:
    """Return the job of this name with ``hidden`` units; with 0, a linear softmax model."""
    data, features = DATA[job]
    model = MLP(features, hidden or (), CLASSES)
    return Job(model=model, data=data, optimizer=RULES[rule])


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
            LocalCluster(ps=self.ps, workers=self.workers, lane=lane),
            description(make_job, **self.arguments),
            overrides={**self.overrides, **overrides},
        )
        return train(plan, look)

    @property
    def arguments(self) -> dict[str, Any]:
        """Those that the job is made of."""
        return {"job": self.job, "hidden": self.hidden, "rule": self.rule}

    @property
    def overrides(self) -> dict[str, Any]:
        """The fields of the job that these options replace."""
        data = {} if self.data is None else {"data": str(self.data.absolute())}
        return {"steps": self.steps, "batch_size": self.batch_size, **data}

    @property
    def row(self) -> dict[str, Any]:
        """The columns of these options in a row of results."""
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


def measure(training: Training, policy: str) -> dict[str, Any]:
    """Return one row: the summary of one run."""
    summary = training.run(lambda status: None, "auto", policy=policy)
    return {**json.loads(summary.json()), "bench": "train", **training.arguments}


@click.command("train")
@training_options(job="mnist", steps=3000)
@click.option("--policy", default="hogwild")
@runs_option
@json_option
def train_command(policy: str, runs: int, as_json: bool, **options: Any) -> None:
    """Train with a cluster of processes; each has one thread of linear algebra.

    \b
    Examples:
      python -m bench train --data DIR
      python -m bench train --job digits --hidden 64 --policy sync-replicas --runs 3
    """
    training = Training(**options)
    rows = report(
        (measure(training, policy) for _ in range(runs)), as_json=as_json, columns=COLUMNS
    )
    if not as_json:
        rates = [row["steps_per_second"] for row in rows]
        click.echo(
            f"steps a second: median {statistics.median(rates):.0f}, "
            f"best {max(rates):.0f}, worst {min(rates):.0f}"
        )
