"""How long a step of synchronous workers takes: gradients added up, updated, and back with all."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import click

from bench.hosts import Hosts
from bench.jobs import USUAL_RULES
from bench.options import json_option, list_of, runs_option, size_type, sizes_type, steps_for
from bench.output import report
from bench.processes import end_in_order, json_lines_of
from bench.push_pull import PushPull, measure
from bench.rank import WARM_UP, on_hosts
from bench.workload import ITEM_NBYTES, Workload, items_of, push_pull_row

GLOO = "gloo"
DIRECT = "direct"
BY_MESSAGES = (DIRECT, "to-one", "one-shot")  # between hosts
RANKS = 2  # of gloo on one host
ON_ONE_HOST = ("board", "ps")
EXCHANGES = (*ON_ONE_HOST, *BY_MESSAGES, GLOO)
TIMEOUT_S = 120.0


def row_of(
    exchange: str,
    megabytes: float,
    workers: int,
    rule: str,
    hosts: Hosts | None,
    *,
    kill: bool = False,
    copies: int = 1,
) -> dict[str, Any]:
    """Measure one exchange. gloo reduces alone, without an update."""
    if hosts is not None:
        few = copies if exchange in (DIRECT, "to-one") else 1
        times = _between(hosts, exchange, megabytes, workers, rule, few)
    elif exchange == GLOO:
        command = [sys.executable, "-m", "bench.peers.gloo", "push-pull"]
        command += ["--megabytes", str(megabytes), "--steps", str(steps_for(megabytes))]
        rows = json_lines_of(command, timeout_s=TIMEOUT_S)
        (times,) = [row for row in rows if row["mode"] == "in_place"]
    else:
        kind = "board" if exchange == "board" else DIRECT
        options: Any = {"rule": rule, "policy": "sync-replicas", "exchange": kind, "kill": kill}
        times = measure(PushPull("shm", "in_place", megabytes, workers, **options))
    sizes = {"exchange": exchange, "megabytes": megabytes, "workers": workers}
    told = ("kill_to_step_ms",) if kill else ("median_ms", "min_ms", "per_second")
    row = {"bench": "all-reduce", **sizes, **{name: times[name] for name in told}}
    if not kill:
        row |= {"update": exchange != GLOO, "bytes_over_bound": times.get("bytes_over_bound")}
    return row


def _between(
    hosts: Hosts, kind: str, megabytes: float, workers: int, rule: str, copies: int
) -> dict[str, Any]:
    """Measure processes that exchange by tcp, each on a host of its own."""
    flags = {"rule": rule, "megabytes": megabytes, "steps": steps_for(megabytes)}
    flags |= {"copies": copies}
    rows = sorted(on_hosts(hosts, kind, workers, **flags), key=lambda row: row["index"])
    began_at = rows[0]["began_at"]
    times = push_pull_row(Workload(kind, "in_place", megabytes), began_at, WARM_UP)
    bound = 2 * (workers - 1) / workers * items_of(megabytes) * ITEM_NBYTES
    sent = max(row["sent"] for row in rows) / (len(began_at) - 1 - WARM_UP)
    return times | {"bytes_over_bound": sent / bound}


def can_run(exchange: str, workers: int, hosts: Hosts | None) -> bool:
    if exchange == GLOO:
        return find_spec("torch") is not None and (workers == RANKS or hosts is not None)
    return (exchange in BY_MESSAGES) == (hosts is not None)


def exchange_name(name: str) -> str:
    if name == "ring":
        instead = "use direct, which sends the bytes of a ring in two latencies instead of 2(n - 1)"
        raise click.BadParameter(f"no ring is here: {instead}")
    return str(click.Choice(EXCHANGES)(name))


def measured(exchanges: Sequence[str], workers: int, *, kill: bool) -> tuple[str, ...]:
    """Return those of the exchanges that are measured.

    Raises:
        UsageError: they are not measured together, or none is.
    """
    if kill and workers < 2:
        raise click.UsageError("--kill needs a worker that goes on; expected --workers 2 or more")
    near, far = (
        [each for each in exchanges if each in kind] for kind in (ON_ONE_HOST, BY_MESSAGES)
    )
    if near and far:
        raise click.UsageError(
            f"workers of {', '.join(near)} are on one host, those of {', '.join(far)} each on its "
            "own; expected one kind; measure them one after another"
        )
    if kill and not near:
        raise click.UsageError("--kill is of board and ps; expected --exchange to name one of them")
    return tuple(near if kill else exchanges)


@click.command("all-reduce")
@click.option(
    "--exchange",
    "exchanges",
    type=list_of(exchange_name, "exchange"),
    default="board,ps,gloo",
    help="board; ps, one of them, in shared memory; gloo, without an update, if PyTorch is "
    "installed; direct, to-one, one-shot: then each worker, and each rank of gloo, is in a network "
    "namespace of its own (Linux, root)",
)
@click.option(
    "--megabytes", "sizes", type=sizes_type, default="0.0003,13,100", help="sizes of a gradient"
)
@click.option("--workers", type=click.IntRange(1, 64), default=2, help="of the step")
@click.option("--rule", type=click.Choice(USUAL_RULES), default="sgd", help="of the update")
@click.option(
    "--copies", type=click.IntRange(1, 64), default=1, help="of each part, of direct and to-one"
)
@click.option("--mbit", type=size_type, help="Mbit/s of the link of each namespace")
@click.option(
    "--kill",
    is_flag=True,
    help="kill a worker, and time how long it takes until the others begin their next step; of "
    "board and ps",
)
@runs_option
@json_option
def all_reduce_command(
    exchanges: tuple[str, ...],
    sizes: tuple[float, ...],
    workers: int,
    rule: str,
    copies: int,
    mbit: float | None,
    kill: bool,
    runs: int,
    as_json: bool,
) -> None:
    """Time a step of synchronous workers by size, nothing computed and every byte in place.

    \b
    Examples:
      python -m bench all-reduce
      python -m bench all-reduce --exchange board,gloo --megabytes 0.0003,13,100 --json
      python -m bench all-reduce --exchange board --workers 4 --rule adam
      python -m bench all-reduce --exchange direct,to-one,gloo --mbit 1000
      python -m bench all-reduce --kill --runs 5
    """
    exchanges = measured(exchanges, workers, kill=kill)

    def rows(hosts: Hosts | None) -> Iterator[dict[str, Any]]:
        for megabytes in sizes:
            for _ in range(runs):
                for exchange in exchanges:
                    if can_run(exchange, workers, hosts):
                        given = exchange, megabytes, workers, rule, hosts
                        yield row_of(*given, kill=kill, copies=copies)

    if not set(BY_MESSAGES) & set(exchanges):
        report(rows(None), as_json=as_json)
        return
    with end_in_order(), Hosts(workers) as hosts:
        if mbit is not None:
            for host in range(workers):
                hosts.throttle(host, mbit)
        report(rows(hosts), as_json=as_json)
