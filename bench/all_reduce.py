"""Time of a synchronous step: gradients added up, applied, and parameters back on all workers."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import product
from typing import Any

import click

from bench import kernels
from bench.hosts import Hosts
from bench.jobs import USUAL_RULES
from bench.options import json_option, list_of, runs_option, size_type, sizes_type, steps_for
from bench.output import report
from bench.peers import openmpi
from bench.peers.environments import OPENMPI as PLACE
from bench.processes import end_in_order, json_lines_of
from bench.push_pull import PushPull, measure
from bench.rank import WARM_UP, on_hosts
from bench.workload import ITEM_NBYTES, Workload, items_of, push_pull_row
from zmqtrain.config.options import flags_of

GLOO, OPENMPI = "gloo", "openmpi"
PEERS = (GLOO, OPENMPI)  # which reduce alone, without an update
KERNEL = "kernel"
DIRECT = "direct"
BY_MESSAGES = (DIRECT, "to-one", "one-shot")  # between hosts
RANKS = 2  # of gloo on one host, and of openmpi
ON_ONE_HOST = ("board", "ps", KERNEL)
EXCHANGES = (*ON_ONE_HOST, *BY_MESSAGES, *PEERS)
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Step:
    """A step that is timed; its fields are in every row of results.

    ``compute_ms``: how long the gradients take before. ``overlap``: the job's.
    """

    exchange: str
    megabytes: float
    workers: int
    rule: str
    copies: int = 1
    compute_ms: float | None = None
    overlap: bool = False


def row_of(step: Step, hosts: Hosts | None, *, kill: bool = False) -> dict[str, Any]:
    """Measure one exchange."""
    exchange, steps = step.exchange, steps_for(step.megabytes)
    flags = ["push-pull", *flags_of({"megabytes": step.megabytes, "steps": steps})]
    if exchange == OPENMPI and hosts is not None:
        namespaces = [hosts.namespace(rank) for rank in range(RANKS)]
        times = _of_peer(openmpi.mpirun(PLACE.python, flags, namespaces))
    elif hosts is not None:
        times = _between(hosts, step, steps)
    elif exchange == GLOO:
        times = _of_peer([sys.executable, "-m", "bench.peers.gloo", *flags])
    elif exchange == KERNEL:
        began_at = kernels.times(step.rule, step.megabytes, step.workers, WARM_UP + steps)
        times = push_pull_row(Workload(KERNEL, "in_place", step.megabytes), began_at, WARM_UP)
    else:
        kind = "board" if exchange == "board" else DIRECT
        options: Any = {"rule": step.rule, "policy": "sync-replicas", "exchange": kind}
        workload = PushPull("shm", "in_place", step.megabytes, step.workers, **options, kill=kill)
        times = measure(workload)
    row = {"bench": "all-reduce", **asdict(step)}
    if kill:
        return row | {"kill_to_step_ms": times["kill_to_step_ms"]}
    told = {name: times[name] for name in ("median_ms", "min_ms", "per_second")}
    told |= {"update": exchange not in PEERS, "bytes_over_bound": times.get("bytes_over_bound")}
    return row | told


def _of_peer(command: Sequence[str]) -> dict[str, Any]:
    rows = json_lines_of(command, timeout_s=TIMEOUT_S)
    (times,) = [row for row in rows if row["mode"] == "in_place"]
    return times


def _between(hosts: Hosts, step: Step, steps: int) -> dict[str, Any]:
    """Measure processes that exchange by tcp, each on a host of its own."""
    workers, megabytes = step.workers, step.megabytes
    flags = {name: getattr(step, name) for name in ("rule", "megabytes", "compute_ms", "overlap")}
    flags |= {"copies": step.copies if step.exchange in (DIRECT, "to-one") else 1}
    rows = on_hosts(hosts, step.exchange, workers, steps=steps, **flags)
    rows.sort(key=lambda row: row["index"])
    began_at = rows[0]["began_at"]
    times = push_pull_row(Workload(step.exchange, "in_place", megabytes), began_at, WARM_UP)
    bound = 2 * (workers - 1) / workers * items_of(megabytes) * ITEM_NBYTES
    sent = max(row["sent"] for row in rows) / (len(began_at) - 1 - WARM_UP)
    return times | {"bytes_over_bound": sent / bound}


def can_run(exchange: str, workers: int, hosts: Hosts | None) -> bool:
    if exchange == GLOO:
        return find_spec("torch") is not None and (workers == RANKS or hosts is not None)
    if exchange == OPENMPI:
        return PLACE.is_installed and workers == RANKS and hosts is not None
    return (exchange in BY_MESSAGES) == (hosts is not None)


def exchange_name(name: str) -> str:
    if name == "ring":
        instead = "use direct, which sends the bytes of a ring in two latencies instead of 2(n - 1)"
        raise click.BadParameter(f"no ring is here: {instead}")
    return str(click.Choice(EXCHANGES)(name))


def measured(
    exchanges: Sequence[str], workers: int, *, kill: bool, compute: bool
) -> tuple[str, ...]:
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
    if OPENMPI in exchanges and not far:
        raise click.UsageError("openmpi is measured between hosts; on one host bench peers does so")
    if kill:
        near = [each for each in near if each != KERNEL]
        if not near:
            wanted = "expected --exchange to name one of them"
            raise click.UsageError(f"--kill is of board and ps; {wanted}")
    if compute and not far:
        wanted = f"expected --exchange to name {' or '.join(BY_MESSAGES)}"
        raise click.UsageError(f"--compute-ms is of exchanges between hosts; {wanted}")
    return tuple(near if kill else far if compute else exchanges)


@click.command("all-reduce")
@click.option(
    "--exchange",
    "exchanges",
    type=list_of(exchange_name, "exchange"),
    default="board,ps,gloo",
    help="board; ps, one of them, in shared memory; kernel, the update alone, on a core for each "
    "worker; gloo, openmpi (see peers), if installed, without an update; direct, to-one, one-shot: "
    "then each worker, and each rank of a peer, is in a network namespace of its own (Linux, root)",
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
    "--compute-ms",
    type=size_type,
    help="how long a gradient of 8 layers takes before, as on a GPU; without overlap and with it; "
    "of direct, to-one, one-shot",
)
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
    compute_ms: float | None,
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
      python -m bench all-reduce --exchange board,kernel --rule adam --megabytes 100
      python -m bench all-reduce --exchange direct,to-one,gloo,openmpi
      python -m bench all-reduce --exchange direct --megabytes 100 --mbit 1000 --compute-ms 800
      python -m bench all-reduce --kill --runs 5
    """
    exchanges = measured(exchanges, workers, kill=kill, compute=compute_ms is not None)

    def rows(hosts: Hosts | None) -> Iterator[dict[str, Any]]:
        forms = (False, True) if compute_ms else (False,)
        for megabytes, _, exchange, overlap in product(sizes, range(runs), exchanges, forms):
            if can_run(exchange, workers, hosts):
                step = Step(exchange, megabytes, workers, rule, copies, compute_ms, overlap)
                yield row_of(step, hosts, kill=kill)

    if not set(BY_MESSAGES) & set(exchanges):
        report(rows(None), as_json=as_json)
        return
    with end_in_order(), Hosts(workers) as hosts:
        if mbit is not None:
            for host in range(workers):
                hosts.throttle(host, mbit)
        report(rows(hosts), as_json=as_json)
