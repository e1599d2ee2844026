"""What a ps holds in memory while it trains, beside what its shard needs."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from bench.blob import RULES
from bench.cluster import Plan, pid_of, process_of, train
from bench.options import json_option, steps_for
from bench.output import report
from bench.weights import ITEM_NBYTES, make_job
from zmqtrain.processes import LocalCluster
from zmqtrain.roles.intake import CREDIT_NBYTES
from zmqtrain.store.segment import SegmentLayout
from zmqtrain.wire.messages import Status

MIB = 1 << 20
ALLOWANCE_NBYTES = 64 * MIB  # for all that is not the shard: interpreter, libraries, messages
EMPTY_MEGABYTES = 0.0003
EMPTY_STEPS = 200
PS = "ps 0"
STOPS = 3  # of a slow ps
STOP_S = 2.0  # less than a lease, or workers would be taken for dead
LANES = ("shm", "tcp")

COLUMNS = (
    *("moment", "step", "rss", "anon", "shmem", "file"),
    *("formula", "excess", "excess_without_file", "own", "ceiling"),
)


@dataclass(frozen=True, slots=True)
class Reading:
    """What is resident of one process, in bytes; ``peak`` is the most there ever was."""

    rss: int
    anon: int
    shmem: int
    file: int
    peak: int


@dataclass(frozen=True, slots=True)
class Shard:
    """What a ps is to hold."""

    megabytes: float
    workers: int
    rule: str
    lane: str

    @property
    def size(self) -> int:
        return max(1, int(self.megabytes * 1e6 / ITEM_NBYTES))

    @property
    def formula_nbytes(self) -> int:
        """Parameters, slots of the rule, a gradient for each worker, and the allowance."""
        arrays = 1 + len(RULES[self.rule].slots) + self.workers
        return arrays * self.size * ITEM_NBYTES + ALLOWANCE_NBYTES

    @property
    def ceiling_nbytes(self) -> int:
        """What the ps says at its start that shard and messages take at most."""
        slots = [slot.name for slot in RULES[self.rule].slots]
        segment = SegmentLayout(self.size, slots).nbytes(self.workers)
        return segment + self.workers * CREDIT_NBYTES


def reading_of(text: str) -> Reading:
    """Return what the text of Linux's /proc/PID/status says."""
    found = dict(re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE))
    names = ("VmRSS", "RssAnon", "RssShmem", "RssFile", "VmHWM")
    return Reading(*(1024 * int(found[name]) for name in names))


class Watch:
    """Reads the memory of ps 0 at a run's first, middle and last look; may stop it on the way."""

    def __init__(self, stops: int = 0) -> None:
        self.readings: dict[str, tuple[int, Reading]] = {}  # moment: (global step, what was read)
        self.peak: tuple[int, Reading]
        self._stops_left = stops
        self._stopped = 0

    def __call__(self, status: Status) -> None:
        text = Path(f"/proc/{pid_of(status, PS)}/status").read_text()
        reading = (status.step, reading_of(text))
        self.peak = reading
        if self._stopped:
            self.readings.setdefault(f"after stop {self._stopped}", reading)
        if status.stop:
            self.readings.setdefault("end", reading)
            return
        self.readings.setdefault("start", reading)
        if 2 * status.step >= status.steps:
            self.readings.setdefault("middle", reading)
        if self._stops_left and status.step:
            self._stops_left -= 1
            self._stopped += 1
            self._stop(status)

    def _stop(self, status: Status) -> None:
        process = process_of(status, PS)
        process.suspend()
        try:
            time.sleep(STOP_S)
        finally:
            process.resume()


def measure(shard: Shard, steps: int, stops: int = 0) -> list[dict[str, Any]]:
    """Run an empty shard, then the one asked for; return a row for each moment.

    The moment "peak" has no parts: the kernel keeps only the sum's highest value.
    """
    empty = _run(Shard(EMPTY_MEGABYTES, shard.workers, shard.rule, shard.lane), EMPTY_STEPS)
    _, at_rest = empty.readings["end"]
    watch = _run(shard, steps, stops)
    rows = [row_of(shard, "empty shard", EMPTY_STEPS, at_rest, at_rest)]
    rows += [
        row_of(shard, moment, step, reading, at_rest)
        for moment, (step, reading) in watch.readings.items()
    ]
    step, last = watch.peak
    return [*rows, peak_row_of(shard, step, last, at_rest)]


def row_of(
    shard: Shard, moment: str, step: int, reading: Reading, empty: Reading
) -> dict[str, Any]:
    """Return what was read, beside what is expected and what an empty shard takes."""
    parts = {
        "anon_bytes": reading.anon,
        "shmem_bytes": reading.shmem,
        "file_bytes": reading.file,
        "excess_without_file_bytes": reading.rss - reading.file - shard.formula_nbytes,
    }
    return _common(shard, moment, step, reading.rss, empty) | parts


def peak_row_of(shard: Shard, step: int, last: Reading, empty: Reading) -> dict[str, Any]:
    """Return the row of the highest memory, taking the pages of libraries to be the last ones."""
    without = {"excess_without_file_bytes": last.peak - last.file - shard.formula_nbytes}
    return _common(shard, "peak", step, last.peak, empty) | without


def _common(shard: Shard, moment: str, step: int, rss: int, empty: Reading) -> dict[str, Any]:
    return {
        "bench": "memory",
        "megabytes": shard.megabytes,
        "workers": shard.workers,
        "rule": shard.rule,
        "lane": shard.lane,
        "moment": moment,
        "step": step,
        "rss_bytes": rss,
        "formula_bytes": shard.formula_nbytes,
        "excess_bytes": rss - shard.formula_nbytes,
        "own_bytes": rss - empty.rss,
        "ceiling_bytes": shard.ceiling_nbytes,
        "empty_bytes": empty.rss,
    }


def in_mib(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row for people: sizes as MiB with one decimal, under names without a unit."""
    return {
        name.removesuffix("_bytes"): f"{value / MIB:.1f}" if name.endswith("_bytes") else value
        for name, value in row.items()
    }


def _run(shard: Shard, steps: int, stops: int = 0) -> Watch:
    settings = {
        "BENCH_MEGABYTES": str(shard.megabytes),
        "BENCH_STEPS": str(steps),
        "BENCH_RULE": shard.rule,
    }
    plan = Plan(
        reference="bench.weights_job",
        settings=settings,
        make=partial(make_job, shard.megabytes, steps, shard.rule),
        cluster=LocalCluster(workers=shard.workers),
        flags={"lane": shard.lane},
    )
    watch = Watch(stops)
    train(plan, watch)
    return watch


def _explanation(rows: list[dict[str, Any]]) -> str:
    empty, *_ = rows
    anon, file = empty["anon_bytes"] / MIB, empty["file_bytes"] / MIB
    peak = rows[-1]
    verdict = "below" if peak["own_bytes"] <= peak["ceiling_bytes"] else "ABOVE"
    return f"""
All in MiB. formula: parameters + optimizer slots + a gradient for each worker + 64 MiB; excess:
what is resident beyond it, with and without the file pages.
anon:  what Python and its libraries have allocated.
shmem: the shard: parameters, slots, gradients.
file:  pages of programs and libraries (LLVM, BLAS, Python). All tasks of a host share them, and the
       kernel drops them when memory is short.
empty shard: a model of 300 bytes. So Python and libraries take {anon:.1f} anon and {file:.1f} file.
own:   what is resident beyond the empty shard. At the peak it is {verdict} the ceiling for shard
       and messages that the ps tells at its start."""


@click.command("memory")
@click.option(
    "--megabytes",
    type=click.FloatRange(0, min_open=True),
    default=100.0,
    show_default=True,
    help="size of the parameters",
)
@click.option("--workers", type=click.IntRange(1, 64), default=2, show_default=True)
@click.option("--rule", type=click.Choice(list(RULES)), default="adam", show_default=True)
@click.option("--lane", type=click.Choice(LANES), default="shm", show_default=True)
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
    megabytes: float,
    workers: int,
    rule: str,
    lane: str,
    steps: int | None,
    slow_ps: bool,
    as_json: bool,
) -> None:
    """Read what a ps holds in memory while it trains (Linux only).

    A ps needs its parameters, its rule's slots, and a gradient for each worker. The rest is set
    beside that: the interpreter, libraries, messages. A run of an empty shard shows what of the
    rest is there anyway.

    \b
    Examples:
      python -m bench memory
      python -m bench memory --lane tcp --rule sgd --workers 4 --megabytes 13
    With a ps that is too slow for its workers, where messages could pile up:
      python -m bench memory --slow-ps --lane tcp --workers 4 --megabytes 13
    """
    shard = Shard(megabytes, workers, rule, lane)
    count = steps or workers * steps_for(megabytes)
    if as_json:
        report(measure(shard, count, STOPS if slow_ps else 0), as_json=True)
        return
    rows = measure(shard, count, STOPS if slow_ps else 0)
    report(map(in_mib, rows), as_json=False, columns=COLUMNS)
    click.echo(_explanation(rows))
