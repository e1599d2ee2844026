"""How long a step of synchronous workers takes: gradients added up, updated, and back with all."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import click

from bench.jobs import USUAL_RULES
from bench.options import json_option, list_of, runs_option, sizes_type, steps_for
from bench.output import report
from bench.processes import json_lines_of
from bench.push_pull import PushPull, measure

GLOO = "gloo"
EXCHANGES = ("board", "direct", GLOO)
RANKS = 2  # of gloo
TIMEOUT_S = 120.0


def row_of(exchange: str, megabytes: float, workers: int, rule: str) -> dict[str, Any]:
    """Measure one exchange. gloo reduces alone, without an update."""
    if exchange == GLOO:
        command = [sys.executable, "-m", "bench.peers.gloo", "push-pull"]
        command += ["--megabytes", str(megabytes), "--steps", str(steps_for(megabytes))]
        rows = json_lines_of(command, timeout_s=TIMEOUT_S)
        (times,) = [row for row in rows if row["mode"] == "in_place"]
    else:
        times = measure(
            PushPull(
                "shm",
                "in_place",
                megabytes,
                workers,
                rule=rule,
                policy="sync-replicas",
                exchange=exchange,
            )
        )
    return {
        "bench": "all-reduce",
        "exchange": exchange,
        "megabytes": megabytes,
        "workers": workers,
        "median_ms": times["median_ms"],
        "min_ms": times["min_ms"],
        "per_second": times["per_second"],
        "update": exchange != GLOO,
    }


def can_run(exchange: str, workers: int) -> bool:
    return exchange != GLOO or (workers == RANKS and find_spec("torch") is not None)


@click.command("all-reduce")
@click.option(
    "--exchange",
    "exchanges",
    type=list_of(click.Choice(EXCHANGES), "exchange"),
    default=",".join(EXCHANGES),
    help="board; direct, to one ps; gloo, without an update, if PyTorch is installed",
)
@click.option(
    "--megabytes", "sizes", type=sizes_type, default="0.0003,13,100", help="sizes of a gradient"
)
@click.option("--workers", type=click.IntRange(1, 64), default=2, help="of the step")
@click.option("--rule", type=click.Choice(USUAL_RULES), default="sgd", help="of the update")
@runs_option
@json_option
def all_reduce_command(
    exchanges: tuple[str, ...],
    sizes: tuple[float, ...],
    workers: int,
    rule: str,
    runs: int,
    as_json: bool,
) -> None:
    """Time a step of synchronous workers by size, nothing computed and every byte in place.

    \b
    Examples:
      python -m bench all-reduce
      python -m bench all-reduce --exchange board,gloo --megabytes 0.0003,13,100 --json
      python -m bench all-reduce --exchange board --workers 4 --rule adam
    """

    def rows() -> Iterator[dict[str, Any]]:
        for megabytes in sizes:
            for _ in range(runs):
                for exchange in exchanges:
                    if can_run(exchange, workers):
                        yield row_of(exchange, megabytes, workers, rule)

    report(rows(), as_json=as_json)
