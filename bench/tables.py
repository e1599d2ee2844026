"""A model of many tables of rows: zmqtrain beside torch's sparse optimizers and TensorFlow's ps."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import click

from bench.options import LANES, compressions_option, json_option, list_of, rows_type, whole_type
from bench.output import report
from bench.peers.environments import TENSORFLOW
from bench.peers.table_work import POLICIES, RATES, Work
from bench.processes import RunError, json_lines_of
from bench.row_kernel import COLUMNS, kernel_rows

PEERS = ("torch", "tensorflow")
TENSORFLOW_RULES = ("adagrad", "sgd")  # whose update of a table changes a batch's rows only
TIMEOUT_S = 600.0
FIGURES = (
    *("examples_per_second", "rows_per_second", "cpu_ms_per_batch"),
    *("rss_mb", "first_batch_s", "nbytes_per_step"),
)


def measure(work: Work, lane: str, side: str) -> dict[str, Any]:
    """Train on a side, in processes and a session of its own; return its row.

    On a busy Linux sessions share the processors evenly, whatever number of threads each has.

    Raises:
        RunError: it failed.
    """
    alone = replace(work, ps=0, workers=1, batches=work.batches * work.workers)
    command = {
        "ours": [sys.executable, "-m", "bench.table_cluster", work.json(), lane],
        "torch": [sys.executable, "-m", "bench.torch_tables", alone.json()],
        "tensorflow": [str(TENSORFLOW.python), "-m", "bench.peers.tensorflow_tables", work.json()],
    }[side]
    return {"lane": None, **json_lines_of(command, timeout_s=TIMEOUT_S)[-1]}


def median_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one row for the runs of a side: medians, and their number."""
    found = dict(rows[0])
    for name in FIGURES:
        known = [row[name] for row in rows if row[name] is not None]
        found[name] = statistics.median(known) if known else None
    rates = [row["examples_per_second"] for row in rows]
    return found | {"runs": len(rows), "least": min(rates), "most": max(rates)}


def rows_of(work: Work, lane: str, peers: Sequence[str], rounds: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each side, the medians of its runs; the sides take turns."""
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in ("ours", *peers)}
    for _ in range(rounds):
        for side in list(runs):
            try:
                row = measure(work, lane, side)
            except RunError as error:
                click.echo(f"{side} {error}", err=True)
                del runs[side]
            else:
                runs[side].append(row)
    yield from (median_of(rows) for rows in runs.values())


def peers_of(rule: str, policy: str, against: Sequence[str]) -> list[str]:
    """Return those that can train so; report the others."""
    refused = {}
    if rule not in TENSORFLOW_RULES:
        refused["tensorflow"] = f"its {rule} changes every row of a table in each step"
    elif not TENSORFLOW.is_installed:
        refused["tensorflow"] = "not installed; python -m bench peers --only tensorflow --install"
    if policy != POLICIES[0]:
        refused["torch"] = f"one process alone, which {POLICIES[0]} has in its comparison"
    for peer in against:
        if peer in refused:
            click.echo(f"{peer} is left out for {rule}, {policy}: {refused[peer]}", err=True)
    return [peer for peer in against if peer not in refused]


@click.command("tables")
@click.option("--tables", type=whole_type, default=26)
@click.option("--rows", "sizes", type=rows_type, default="1e5", help="of a table; one run for each")
@click.option("--dim", type=whole_type, default=16, help="elements of a row")
@click.option("--batch-size", type=whole_type, default=2048)
@click.option("--hidden", type=click.IntRange(0), default=0, help="units of a hidden layer")
@click.option("--rule", "rules", type=list_of(click.Choice(list(RATES)), "rule"), default="adagrad")
@click.option(
    "--policy", "policies", type=list_of(click.Choice(POLICIES), "policy"), default="hogwild"
)
@click.option("--ps", type=click.IntRange(0, 64), default=1)
@click.option("--workers", type=click.IntRange(1, 64), default=1)
@click.option("--lane", type=click.Choice(LANES), default="shm")
@compressions_option("none", "of rows and the rest on lane tcp")
@click.option("--threads", type=whole_type, default=1, help="of each worker, or of torch's loop")
@click.option("--batches", type=click.IntRange(10), default=150, help="for each worker")
@click.option("--rounds", type=click.IntRange(1), default=1, help="how often each side trains")
@click.option("--against", type=list_of(click.Choice(PEERS), "side"), default="torch")
@click.option(
    "--part",
    type=click.Choice(("train", "kernel")),
    default="train",
    help="kernel: a ps alone, with a table of so many trained rows",
)
@json_option
def tables_command(
    part: str,
    sizes: tuple[int, ...],
    rules: tuple[str, ...],
    policies: tuple[str, ...],
    compressions: tuple[str, ...],
    lane: str,
    rounds: int,
    against: tuple[str, ...],
    as_json: bool,
    **options: Any,
) -> None:
    """Train a model that looks up a row in each of many tables.

    The data have Criteo's shape: 13 numbers, an id for each table, zipf 1.05. torch is one process
    with `nn.EmbeddingBag(sparse=True)` and SparseAdam, Adagrad or SGD. tensorflow is TensorFlow
    2.14: ParameterServerStrategy for hogwild, SyncReplicasOptimizer for sync-replicas.

    \b
    Examples:
      python -m bench tables --rule adam,adagrad,sgd --rows 1e6
      python -m bench tables --workers 2 --policy hogwild,sync-replicas --against tensorflow
      python -m bench tables --rows 1e5,1e7 --lane tcp --compression none,bf16 --json
      python -m bench tables --part kernel --rows 5e6
    """
    if part == "kernel":
        found = (row for size in sizes for row in kernel_rows(size, options["dim"]))
        report(found, as_json=as_json, columns=COLUMNS)
        return

    def rows() -> Iterator[dict[str, Any]]:
        for size, rule, policy, spec in product(sizes, rules, policies, compressions):
            work = Work(rows=size, rule=rule, policy=policy, compression=spec, **options)
            yield from rows_of(work, lane, peers_of(rule, policy, against), rounds)

    report(rows(), as_json=as_json)
