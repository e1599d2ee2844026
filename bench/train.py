"""Global steps a second of whole processes: what `zmqtrain run` gives."""

from __future__ import annotations

import json
import statistics
from typing import Any

import click

from bench.options import json_option, runs_option
from bench.output import report
from bench.training import Training, training_options

COLUMNS = (
    *("policy", "ps", "workers", "global_step", "seconds", "steps_per_second"),
    *("loss", "accuracy"),
)


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
