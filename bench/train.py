"""Global steps a second of whole processes: what `zmqtrain run` gives."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from bench.options import json_option
from bench.output import report
from bench.processes import RunError, json_lines_of
from bench.training import training_options

COLUMNS = (
    *("policy", "ps", "workers", "global_step", "seconds", "steps_per_second"),
    *("loss", "accuracy"),
)
START_UP_S = 120.0  # of a run's time limit
SLOWEST_STEPS_PER_SECOND = 5.0  # the rest of a run's time limit is for so many


def measure(
    job: str, *, hidden: int, rule: str, steps: int, data: Path | None, flags: dict[str, Any]
) -> dict[str, Any]:
    """Return one row: the summary of one run of ``zmqtrain run``, given ``flags`` as well.

    Raises:
        RunError: the run failed.
    """
    if data is not None:
        flags = {**flags, "data": data.absolute()}
    arguments = [
        part
        for name, value in {**flags, "steps": steps}.items()
        for part in (f"--{name.replace('_', '-')}", str(value))
    ]
    rows = json_lines_of(
        [sys.executable, "-m", "zmqtrain", "run", "bench.train_job", "--json", *arguments],
        settings={"BENCH_JOB": job, "BENCH_HIDDEN": str(hidden), "BENCH_RULE": rule},
        timeout_s=START_UP_S + steps / SLOWEST_STEPS_PER_SECOND,
    )
    return {**rows[-1], "bench": "train", "job": job, "hidden": hidden, "rule": rule}


@click.command("train")
@training_options(job="mnist", steps=3000)
@click.option("--policy", default="hogwild", show_default=True)
@click.option(
    "--runs",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="how many times, one after another",
)
@json_option
def train_command(
    job: str,
    hidden: int,
    rule: str,
    steps: int,
    data: Path | None,
    runs: int,
    as_json: bool,
    **flags: Any,
) -> None:
    """Train with a cluster of processes; each has one thread of linear algebra.

    \b
    Examples:
      python -m bench train --data DIR
      python -m bench train --job digits --hidden 64 --policy sync-replicas --runs 3
    """
    rates: list[float] = []

    def rows() -> Iterator[dict[str, Any]]:
        for _ in range(runs):
            try:
                row = measure(job, hidden=hidden, rule=rule, steps=steps, data=data, flags=flags)
            except RunError as error:
                raise click.ClickException(f"zmqtrain run {error}") from None
            rates.append(row["steps_per_second"])
            yield row

    report(rows(), as_json=as_json, columns=COLUMNS)
    if not as_json:
        click.echo(
            f"steps a second: median {statistics.median(rates):.0f}, "
            f"best {max(rates):.0f}, worst {min(rates):.0f}"
        )
