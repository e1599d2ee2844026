"""Sides that take turns in one run, so that a noisy machine hits all alike; and their ratios."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import cycle
from typing import Any, TypeVar

import click

from bench.peers.lineup import Entrant
from bench.processes import RunError, json_lines_of
from bench.workload import Row, Workload

SAME = ("bench", *(field.name for field in fields(Workload)))  # of all runs of a side

Side = TypeVar("Side")


def turns(ours: Sequence[Side], peers: Sequence[Side], rounds: int) -> Iterator[Side]:
    """Yield who runs next: in each round every peer once, and one of ours before each.

    Ours take turns among themselves; each runs at least once a round.
    """
    our_next = cycle(ours)
    for _ in range(rounds):
        for index in range(max(len(ours), len(peers))):
            yield next(our_next)
            yield from peers[index : index + 1]


def compared(
    ours: Sequence[Entrant], peers: Sequence[Entrant], rounds: int, timeout_s: float
) -> list[dict[str, Any]]:
    """Run all sides; return a row for each and mode, with its ratio to the first of ours.

    A side that fails is reported on stderr, and is not run again.
    """
    rows: list[Row] = []
    failed = set()
    for side in turns(ours, peers, rounds):
        if side.name in failed:
            continue
        click.echo(f"{side.name} ...", err=True)
        try:
            rows += map(side.row_of, json_lines_of(side.command, timeout_s=timeout_s))
        except RunError as error:
            failed.add(side.name)
            click.echo(f"{side.name} {error}", err=True)
    return with_ratios(summed_up(rows), ours[0].name)


def summed_up(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return one row for each lane and mode: the median of its runs' medians, and their spread.

    ``min_ms`` is the fastest single step of all runs, ``worst_ms`` the slowest run's median.
    """
    runs: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        runs.setdefault((row["lane"], row["mode"]), []).append(row)
    return [_summed_up(same) for same in runs.values()]


def _summed_up(runs: Sequence[Row]) -> dict[str, Any]:
    medians = [run["median_ms"] for run in runs]
    median_ms = statistics.median(medians)
    result = {key: runs[0][key] for key in SAME}
    result |= {
        "runs": len(runs),
        "median_ms": median_ms,
        "min_ms": min(run["min_ms"] for run in runs),
        "worst_ms": max(medians),
        "per_second": 1e3 / median_ms,
    }
    if "accuracy" in runs[0]:
        result["accuracy"] = statistics.median(run["accuracy"] for run in runs)
    return result


def with_ratios(rows: Sequence[Row], reference: str) -> list[dict[str, Any]]:
    """Return the rows with ``ratio``: how many times as long as the lane ``reference`` takes.

    Like is compared with like: a row of the same mode. Where there is none, the ratio is None.
    """
    reference_ms = {row["mode"]: row["median_ms"] for row in rows if row["lane"] == reference}
    return [
        {**row, "ratio": row["median_ms"] / ms if (ms := reference_ms.get(row["mode"])) else None}
        for row in rows
    ]
