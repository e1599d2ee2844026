"""A model of many tables of rows that is trained, alike by every side of `bench tables`.

The scripts of the peers use this as well: their environments lack zmqtrain and what it needs.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from examples.clicks import Clicks

POLICIES = ("hogwild", "sync-replicas")
RATES = {"adam": 0.001, "adagrad": 0.01, "sgd": 0.1}  # learning rates, by rule
BATCHES = 64  # different ones
WARM_UP = 0.3  # of the batches, that are not timed


@dataclass(frozen=True, slots=True)
class Work:
    """The model that is trained, and the number of batches.

    The model looks up a row of each table for an example; the rows, side by side with the numbers,
    go through a hidden layer of ReLU (0 units: none) and a linear one to the logit of a click.
    ``batches``: of each worker.
    """

    tables: int
    rows: int
    dim: int
    batch_size: int
    hidden: int
    rule: str
    policy: str
    ps: int
    workers: int
    batches: int
    threads: int = 1
    compression: str = "none"

    @classmethod
    def of(cls, text: str) -> Work:
        return cls(**json.loads(text))

    def json(self) -> str:
        return json.dumps(asdict(self))

    @property
    def clicks(self) -> Clicks:
        return Clicks((self.rows,) * self.tables, examples=BATCHES * self.batch_size, held_out=1000)

    def arrays(self) -> tuple[NDArray[Any], ...]:
        """Return numbers, ids and clicks of all different batches, one after another."""
        return self.clicks.arrays(BATCHES * self.batch_size, 0)

    @property
    def width(self) -> int:
        """Number of inputs of the first layer."""
        return self.tables * self.dim + self.clicks.numbers

    @property
    def widths(self) -> list[int]:
        return [self.width, *([self.hidden] if self.hidden else []), 1]

    def distinct_rows(self) -> float:
        """Return how many rows of all tables a batch looks up, a mean of some batches."""
        ids = self.clicks.arrays(8 * self.batch_size, 0)[-2]
        batches = ids.reshape(-1, self.batch_size, self.tables)
        return statistics.mean(sum(len(np.unique(ids)) for ids in batch.T) for batch in batches)


@dataclass(frozen=True, slots=True)
class Times:
    """Times in seconds of a clock that the processes of a host share.

    ``built_at``: the worker began to build its model. ``began_at``: each batch began, and the last
    one ended.
    """

    built_at: float
    began_at: Sequence[float]


class Stopwatch:
    """Notes the times of a worker."""

    def __init__(self) -> None:
        self._built_at = time.monotonic()
        self._began_at: list[float] = []

    def batches(self, count: int, when_warm: Callable[[], object]) -> Iterator[int]:
        """Yield the numbers of batches, and note when each begins, and when the last one ends.

        ``when_warm`` is called before the first one that is timed.
        """
        for number in range(count):
            if number == int(WARM_UP * count):
                when_warm()
            self._began_at.append(time.monotonic())
            yield number
        self._began_at.append(time.monotonic())

    @property
    def times(self) -> Times:
        return Times(self._built_at, tuple(self._began_at))


def rate_of(workers: Iterable[Times]) -> float:
    """Return how many batches a second all workers compute, from when the last one has warmed up
    until the first one ends."""
    every = [times.began_at for times in workers]
    begin = max(began_at[int(WARM_UP * len(began_at))] for began_at in every)
    end = min(began_at[-1] for began_at in every)
    counted = sum(_passed(began_at, end) - _passed(began_at, begin) for began_at in every)
    return counted / (end - begin)


def _passed(began_at: Sequence[float], moment: float) -> float:
    """Return how many batches have been computed, with the part of the one under way."""
    return float(np.interp(moment, began_at, np.arange(len(began_at))))


def first_batch_s(workers: Iterable[Times]) -> float:
    """Return seconds from the building of the models to the end of the first batch."""
    every = list(workers)
    ends = min(times.began_at[1] for times in every)
    return ends - min(times.built_at for times in every)


@dataclass(frozen=True, slots=True)
class Measured:
    """Figures of a side: of all workers; memory and time of processors of all processes."""

    batches_per_second: float
    first_batch_s: float
    cpu_s_per_batch: float
    memory_mb: float | None
    nbytes_per_step: float | None = None  # sent and received by the workers for a batch

    def row(self, work: Work, side: str) -> dict[str, Any]:
        names = ("rule", "tables", "rows", "dim", "batch_size", "hidden", "policy", "ps", "workers")
        return {
            "bench": "tables",
            "side": side,
            **{name: getattr(work, name) for name in (*names, "threads", "compression")},
            "examples_per_second": self.batches_per_second * work.batch_size,
            "rows_per_second": self.batches_per_second * work.distinct_rows(),
            "cpu_ms_per_batch": 1e3 * self.cpu_s_per_batch,
            "rss_mb": self.memory_mb,
            "first_batch_s": self.first_batch_s,
            "nbytes_per_step": self.nbytes_per_step,
        }


class Meter:
    """Measures the time that processes spend on processors, between the warm-up and the end."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = list(pids)
        self._begin: tuple[float, float] | None = None
        self.cpu_s_per_batch = 0.0

    def note(self, batches: float) -> None:
        """Note that this many batches have been computed."""
        if self._begin is None:
            self._begin = cpu_s(self._pids), batches
        elif batches > self._begin[1]:
            seconds = cpu_s(self._pids) - self._begin[0]
            self.cpu_s_per_batch = seconds / (batches - self._begin[1])

    def measured(self, workers: Sequence[Times], pids: Iterable[int]) -> Measured:
        """Return the figures of these workers; ``pids``: whose memory counts."""
        rates = rate_of(workers), first_batch_s(workers)
        return Measured(*rates, self.cpu_s_per_batch, memory_mb(pids))


def cpu_s(pids: Iterable[int]) -> float:
    """Return seconds that live processes have spent on processors; Linux only, else 0."""
    ticks = 0
    for pid in pids:
        if (file := Path(f"/proc/{pid}/stat")).exists():
            words = file.read_text().rpartition(")")[2].split()
            ticks += int(words[11]) + int(words[12])  # utime and stime, fields 14 and 15
    return ticks / os.sysconf("SC_CLK_TCK")


def memory_mb(pids: Iterable[int]) -> float | None:
    """Return the memory of processes in MB of 10^6 bytes, pages that they share once; Linux only.

    That is the kernel's proportional share of each (Pss).
    """
    files = [Path(f"/proc/{pid}/smaps_rollup") for pid in pids]
    if not all(file.exists() for file in files):
        return None
    found = [re.search(r"^Pss:\s+(\d+) kB", file.read_text(), re.MULTILINE) for file in files]
    return round(sum(1024 * int(match[1]) for match in found if match) / 1e6, 1)
