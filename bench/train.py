"""Global steps a second of whole processes: what `zmqtrain run` gives."""

from __future__ import annotations

import statistics
import sys
from typing import Any

import click

from bench.jobs import variables_of
from bench.options import flags_of, json_option, runs_option
from bench.output import report
from bench.processes import RunError, json_lines_of
from bench.training import REFERENCE, Training, training_options

COLUMNS = (
    *("policy", "ps", "workers", "global_step", "seconds", "steps_per_second"),
    *("loss", "accuracy"),
)
START_UP_S = 120.0  # of a run's time limit
SLOWEST_STEPS_PER_SECOND = 5.0  # the rest of a run's time limit is for so many


def measure(training: Training, policy: str) -> dict[str, Any]:
    """Return one row: the summary of one run of ``zmqtrain run``.

    Raises:
        RunError: the run failed.
    """
    cluster = {"ps": training.ps, "workers": training.workers, "policy": policy}
    flags = flags_of({**cluster, **training.overrides})
    rows = json_lines_of(
        [sys.executable, "-m", "zmqtrain", "run", REFERENCE, "--json", *flags],
        settings=variables_of(training.arguments),
        timeout_s=START_UP_S + training.steps / SLOWEST_STEPS_PER_SECOND,
    )
    return {**rows[-1], "bench": "train", **training.arguments}


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
    try:
        rows = report(
            (measure(training, policy) for _ in range(runs)), as_json=as_json, columns=COLUMNS
        )
    except RunError as error:
        raise click.ClickException(f"zmqtrain run {error}") from None
    if not as_json:
        rates = [row["steps_per_second"] for row in rows]
        click.echo(
            f"steps a second: median {statistics.median(rates):.0f}, "
            f"best {max(rates):.0f}, worst {min(rates):.0f}"
        )
