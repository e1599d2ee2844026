"""Memory of a ps, or of workers without one, after many pushes, beside what they need."""

from __future__ import annotations

import os
import re
import signal
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import click

from bench.cluster import Plan, pid_of, train
from bench.jobs import RULES, USUAL_RULES, blob_job, description
from bench.options import LANES, json_option, lanes_option, list_of, size_type, steps_for
from bench.output import report
from bench.workload import ITEM_NBYTES, items_of
from zmqtrain.config.cluster import Cluster, Role
from zmqtrain.local.processes import LocalCluster
from zmqtrain.planning.plan import plan_for
from zmqtrain.protocol.status import Status
from zmqtrain.store.shard import segment_layout
from zmqtrain.wire.chunks import MESSAGES_NBYTES

ALLOWANCE_NBYTES = 64 << 20  # for all that is not the shard: interpreter, libraries, messages
EMPTY_MEGABYTES = 0.0003
EMPTY_STEPS = 200
PS = "ps 0"
LANES_OF = {"ps": LANES, "board": ("shm",), "direct": ("tcp",)}
STOPS = 3  # of a slow ps
STOP_S = 2.0  # less than a lease, or workers would be taken for dead

COLUMNS = (
    *("lane", "rule", "workers", "exchange", "pushes", "stops"),
    *("rss_mb", "anon_shmem_mb", "file_mb"),
    *("formula_mb", "over_mb", "over_without_file_mb", "empty_mb", "own_peak_mb", "ceiling_mb"),
)
LEGEND = """\
All sizes are in MB of 10^6 bytes; the names leave _mb out here.
stops       how often the ps was made to stand still
anon_shmem  what Python and its libraries have allocated, and the shard
file        pages of programs and libraries (Python, BLAS), which all tasks of a host share
            and the kernel drops when memory is short; rss = anon_shmem + file
formula     parameters + optimizer slots + a gradient for each worker + 64 MiB
over        rss - formula; over_without_file: anon_shmem - formula
empty       rss of a ps whose shard has 300 bytes
own_peak    the highest rss of the whole run - empty
ceiling     what the ps says at its start that shard and messages take at most
Sizes of workers alone (board, direct) are of all together: what several processes map counts once,
the formula has 64 MiB for each and, with direct, what each has of parameters and gradient by tcp;
the peak is of looks a few times a second."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The shard that a ps holds, its workers, and the way of their gradients.

    ``exchange``: ps, of which there is one; board or direct of workers that have none.
    """

    lane: str
    rule: str
    megabytes: float
    workers: int
    exchange: str

    @property
    def has_ps(self) -> bool:
        return self.exchange == "ps"

    @property
    def parts(self) -> int:
        """Number of ps; there are as many variables, so that each of them is whole."""
        return self.workers if self.exchange == "direct" else 1

    @property
    def by_tcp_nbytes(self) -> int:
        """Bytes of parameters and gradients that workers receive by tcp, if they are counted."""
        workers = self.workers if self.exchange == "direct" else 0
        return workers * 2 * items_of(self.megabytes) * ITEM_NBYTES

    @property
    def formula_nbytes(self) -> int:
        """Parameters, slots of the rule, a gradient for each worker, and the allowance."""
        arrays = 1 + len(RULES[self.rule].slots) + self.workers
        allowance = ALLOWANCE_NBYTES * (1 if self.has_ps else self.workers)
        return arrays * items_of(self.megabytes) * ITEM_NBYTES + self.by_tcp_nbytes + allowance

    @property
    def ceiling_nbytes(self) -> int:
        """The most bytes that shards and messages take, as all ps log it at their start."""
        job = blob_job(self.megabytes, 1, self.rule, parts=self.parts)
        layouts = plan_for(job, Cluster(("",) * self.parts, self.workers)).layouts
        segments = [segment_layout(layout, job.update()) for layout in layouts]
        messages = self.parts * self.workers * MESSAGES_NBYTES
        return sum(each.nbytes(self.workers) for each in segments) + messages + self.by_tcp_nbytes


@dataclass(frozen=True, slots=True)
class Reading:
    """Resident memory of one process in bytes; ``peak``: the most since its start."""

    rss: int
    anon: int
    shmem: int
    file: int
    peak: int


def reading_of(text: str) -> Reading:
    """Return what the text of Linux's /proc/PID/status says."""
    found = dict(re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE))
    names = ("VmRSS", "RssAnon", "RssShmem", "RssFile", "VmHWM")
    return Reading(*(1024 * int(found[name]) for name in names))


class Watch:
    """Reads the memory of ps 0 when the last step is done; may stop the ps on the way."""

    def __init__(self, stops: int = 0) -> None:
        self.pushes = 0
        self.stops = 0  # that there were
        self.reading: Reading
        self._stops_wanted = stops

    def __call__(self, status: Status) -> None:
        if status.stop:
            self.pushes = sum(task.step for task in status.tasks if task.role == Role.WORKER)
            self.reading = reading_of(Path(f"/proc/{pid_of(status, PS)}/status").read_text())
        elif status.step and self.stops < self._stops_wanted:
            self.stops += 1
            self._stop(status)

    def _stop(self, status: Status) -> None:
        pid = pid_of(status, PS)
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(STOP_S)
        finally:
            os.kill(pid, signal.SIGCONT)


class WatchOfWorkers(Watch):
    """Reads what all workers hold together, a page that several map in parts; see proc(5), Pss."""

    def __init__(self) -> None:
        super().__init__()
        self._peak = 0

    def __call__(self, status: Status) -> None:
        workers = [task for task in status.tasks if task.role == Role.WORKER]
        pids = [pid_of(status, task.task) for task in workers]
        rollup = "".join(Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in pids)
        found: Counter[str] = Counter()
        for name, kilobytes in re.findall(r"^(\w+): +(\d+) kB$", rollup, re.MULTILINE):
            found[name] += 1024 * int(kilobytes)
        self._peak = max(self._peak, found["Pss"])
        kinds = found["Pss_Anon"], found["Pss_Shmem"], found["Pss_File"]
        self.reading = Reading(found["Pss"], *kinds, self._peak)
        self.pushes = sum(task.step for task in workers)


def measure(shard: Shard, steps: int, stops: int = 0) -> dict[str, Any]:
    """Run an empty shard, then the one asked for; return one row."""
    empty = _run(replace(shard, megabytes=EMPTY_MEGABYTES), EMPTY_STEPS)
    watch = _run(shard, steps, stops)
    return {
        "bench": "memory",
        **asdict(shard),
        "pushes": watch.pushes,
        "stops": watch.stops,
        **sizes(shard, watch.reading, empty.reading),
    }


def sizes(shard: Shard, full: Reading, empty: Reading) -> dict[str, float]:
    """Return what is resident, beside what is expected and what an empty shard takes, in MB."""
    nbytes = {
        "rss": full.rss,
        "anon_shmem": full.anon + full.shmem,
        "file": full.file,
        "formula": shard.formula_nbytes,
        "over": full.rss - shard.formula_nbytes,
        "over_without_file": full.anon + full.shmem - shard.formula_nbytes,
        "empty": empty.rss,
        "own_peak": full.peak - empty.rss,
        "ceiling": shard.ceiling_nbytes,
    }
    return {f"{name}_mb": round(value / 1e6, 1) for name, value in nbytes.items()}


def _run(shard: Shard, steps: int, stops: int = 0) -> Watch:
    """Train with a ps that holds the shard."""
    watch = Watch(stops) if shard.has_ps else WatchOfWorkers()
    arguments = {"megabytes": shard.megabytes, "steps": steps, "rule": shard.rule}
    plan = Plan(
        LocalCluster(ps=int(shard.has_ps), workers=shard.workers, lane=shard.lane),
        description(blob_job, **arguments, parts=shard.parts),
        overrides={} if shard.has_ps else {"exchange": shard.exchange},
    )
    train(plan, watch)
    return watch


@click.command("memory")
@lanes_option
@click.option(
    "--rule",
    "rules",
    type=list_of(click.Choice(USUAL_RULES), "rule"),
    default=",".join(USUAL_RULES),
)
@click.option("--megabytes", type=size_type, default=13.0, help="size of the parameters")
@click.option("--workers", type=click.IntRange(1, 64), default=2)
@click.option(
    "--exchange",
    "exchanges",
    type=list_of(click.Choice(list(LANES_OF)), "exchange"),
    default="ps",
    help="ps, one of them; board, of workers alone, on lane shm; direct, of workers alone, on tcp",
)
@click.option(
    "--steps", type=click.IntRange(1), help="global steps; default: some seconds' worth of them"
)
@click.option(
    "--slow-ps",
    is_flag=True,
    help=f"stop the ps {STOPS} times for {STOP_S:g} s (SIGSTOP), while its workers push on",
)
@json_option
def memory_command(
    lanes: tuple[str, ...],
    rules: tuple[str, ...],
    megabytes: float,
    workers: int,
    exchanges: tuple[str, ...],
    steps: int | None,
    slow_ps: bool,
    as_json: bool,
) -> None:
    """Read what a ps holds in memory when its workers have pushed (Linux only).

    A ps needs its parameters, its rule's slots, and a gradient for each worker. The rest is set
    beside that: the interpreter, libraries, messages. The gradients cost the workers next to
    nothing, so they are always faster than the ps; with --slow-ps what could pile up does.

    \b
    Examples:
      python -m bench memory
      python -m bench memory --exchange board,direct --workers 4 --megabytes 100
      python -m bench memory --slow-ps --lane tcp --rule sgd --workers 4 --megabytes 40
    """
    count = steps or workers * steps_for(megabytes)
    stops = STOPS if slow_ps else 0
    shards = [
        Shard(lane, rule, megabytes, workers, exchange)
        for exchange, lane, rule in product(exchanges, lanes, rules)
        if lane in LANES_OF[exchange]
    ]
    rows = (measure(shard, count, stops) for shard in shards)
    report(rows, as_json=as_json, columns=COLUMNS)
    if not as_json:
        click.echo(f"Parameters of {megabytes:g} MB. {LEGEND}")
