"""Measures zmqtrain: `python -m bench NAME [--json]`."""

from __future__ import annotations

import json
import platform
from typing import Any

import click
import psutil
from rich.console import Console
from rich.table import Table

from bench import kernels as kernel_bench
from bench.push_pull import LANES, measure

STEPS = {0.01: 3000, 0.5: 1500, 2.0: 400, 20.0: 80}  # up to so many megabytes, so many steps


@click.group()
def main() -> None:
    """Measure zmqtrain on this machine."""


@main.command("push-pull")
@click.option("--lane", type=click.Choice(LANES), default="tcp", show_default=True)
@click.option("--megabytes", default="0.0003,0.3,1,13,100", show_default=True)
@click.option("--workers", type=click.IntRange(1, 64), default=1, show_default=True)
@click.option("--ps", type=click.IntRange(1, 64), default=1, show_default=True)
@click.option("--rule", type=click.Choice(["sgd", "adam"]), default="sgd", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="print one JSON object a line")
def push_pull(lane: str, megabytes: str, workers: int, ps: int, rule: str, as_json: bool) -> None:
    """Time one push+pull by size, with every byte touched and in place.

    \b
    Examples:
      python -m bench push-pull
      python -m bench push-pull --lane ipc --megabytes 0.0003,13 --workers 2 --rule adam
    """
    rows = []
    for size in map(float, megabytes.split(",")):
        steps = next((n for limit, n in STEPS.items() if size <= limit), 20)
        for mode in ("touched", "in_place"):
            row = measure(lane, size, workers=workers, ps=ps, rule=rule, mode=mode, steps=steps)
            if as_json:
                click.echo(json.dumps(row))
            rows.append(row)
    if not as_json:
        show(rows)


@main.command()
@click.option(
    "--rule", type=click.Choice(list(kernel_bench.RULES)), default="adam", show_default=True
)
@click.option("--megabytes", default="1,13,100", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="print one JSON object a line")
def kernels(rule: str, megabytes: str, as_json: bool) -> None:
    """Time one update on one core, in gigabytes of parameters a second.

    \b
    Examples:
      python -m bench kernels
      python -m bench kernels --rule sgd --megabytes 100 --json
    """
    rows = []
    for size in map(float, megabytes.split(",")):
        for row in kernel_bench.measure(rule, size):
            if as_json:
                click.echo(json.dumps(row))
            rows.append(row)
    if not as_json:
        show(rows)


def show(rows: list[dict[str, Any]]) -> None:
    """Print results as a table, with the machine that they are of."""
    memory_gb = psutil.virtual_memory().total / 1e9
    title = f"{platform.machine()}, {psutil.cpu_count()} cores, {memory_gb:.0f} GB"
    table = Table(title=title, title_justify="left")
    for key in rows[0]:
        table.add_column(key)
    for row in rows:
        table.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
