"""The work of a ps on rows of a table, alone on one core: `bench tables --part kernel`."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.peers.table_work import memory_mb
from zmqtrain.models.tables import Ids, RowsOf, TableVariable, Uniform, key_of
from zmqtrain.optim import SGD, Adam, Mean, RowwiseAdagrad, Rule, Update
from zmqtrain.protocol.orders import Apply
from zmqtrain.store.holdings.tables import Tables
from zmqtrain.store.layout import Variable
from zmqtrain.store.placement import place
from zmqtrain.store.segment import Segment
from zmqtrain.store.shard import Shard, segment_layout
from zmqtrain.store.table_layout import table_layouts
from zmqtrain.store.table_memory import TableMemory

Floats = NDArray[np.float32]

BATCH_ROWS = 30_000  # distinct rows of a batch: of 26 tables and 2,048 examples, zipf 1.05
ADAM, ADAGRAD = Adam(0.001), RowwiseAdagrad(0.01)
WARM_UP, ROUNDS = 3, 15
COLUMNS = (
    *("what", "rows", "dim", "cpu_ms", "worst_cpu_ms", "worst_ms", "whole_cpu_ms"),
    *("numpy_cpu_ms", "ratio", "rss_mb"),
)


class Seconds(NamedTuple):
    """Seconds that a piece of work took, and seconds of processor time in it."""

    wall: float
    cpu: float


class Ps:
    """A shard with one table of rows, any int64 an id, and pushes for it."""

    def __init__(self, rule: Rule, dim: int) -> None:
        self.table = TableVariable("rows", 0, dim, None, Uniform(0.05), key_of(0, "rows"))
        update = Update(rule)
        self.memory = TableMemory.private(table_layouts([self.table], [update]))
        (layout,) = place([Variable("bias", (1,))], 1, partition_nbytes=4)
        self.tables = Tables([update], self.memory)
        dense = Update(SGD(0.1))
        segment = Segment.private(segment_layout(layout, dense))
        self.shard = Shard(layout, dense, segment, safe=True, batch_size=1, tables=self.tables)
        self.shard.initialize(np.zeros(1, np.float32))
        self._pushes = 0

    def push(self, ids: Ids) -> Seconds:
        """Train the rows with these sorted unique ids; return what the update took."""
        rows = np.full((len(ids), self.table.dim), 1e-3, np.float32)
        self.memory.buffer(0).write([RowsOf(0, ids, rows)])
        self.shard.segment.gradient(0)[:] = 0
        self.shard.stage(0, 0, self._pushes, 1.0)
        self._pushes += 1
        return _timed(lambda: self.shard.carry_out(Apply(0)))

    def grow(self, ids: Ids, step: int) -> list[Seconds]:
        """Train these rows in pushes of ``step`` rows; return the time of each update."""
        return [self.push(np.sort(ids[at : at + step])) for at in range(0, len(ids), step)]


def kernel_rows(trained: int, dim: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each measurement, with a table of ``trained`` trained rows."""
    row = {"bench": "tables", "part": "kernel", "rows": trained, "dim": dim}
    yield row | {"what": "first batch"} | _first_batch(dim)
    yield row | {"what": "growth"} | _growth(trained, dim)
    yield row | {"what": "update"} | _updates(trained, dim)


def _first_batch(dim: int) -> dict[str, Any]:
    """Make a table of any number of ids, and read and train the rows of a batch."""

    def train() -> None:
        ps, ids = Ps(ADAM, dim), np.unique(_random().integers(0, 1 << 62, BATCH_ROWS))
        ps.memory.read(0, ids)
        ps.push(ids)

    before, seconds = _memory_mb(), _timed(train)
    return {"cpu_ms": 1e3 * seconds.cpu, "rss_mb": _memory_mb() - before}


def _growth(trained: int, dim: int) -> dict[str, Any]:
    """Train ``trained`` rows of a new table, a few thousand new ones with each push."""
    ids = _random().permutation(trained)
    before, ps = _memory_mb(), Ps(ADAGRAD, dim)
    seconds = ps.grow(ids, BATCH_ROWS // 4)
    return {
        "cpu_ms": 1e3 * statistics.median(each.cpu for each in seconds),
        "worst_cpu_ms": 1e3 * max(each.cpu for each in seconds),
        "worst_ms": 1e3 * max(each.wall for each in seconds),
        "rss_mb": _memory_mb() - before,
    }


def _updates(trained: int, dim: int) -> dict[str, Any]:
    """Update rows that were trained before, by Adam; beside NumPy, which only moves them."""
    ps, random = Ps(ADAM, dim), _random()
    ps.grow(random.permutation(trained), 1 << 18)
    records = np.ones((trained, 3 * dim), np.float32)  # rows, and two moments
    kernel = _kernel(ps, dim)
    sides: dict[str, Callable[[Ids], Seconds]] = {
        "kernel": lambda ids: _timed(partial(kernel, np.sort(ids))),
        "whole": lambda ids: ps.push(np.sort(ids)),
        "numpy": lambda ids: _timed(partial(_move, records, ids)),
    }
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(WARM_UP + ROUNDS):
        for name, side in sides.items():
            taken[name].append(side(random.choice(trained, BATCH_ROWS, replace=False)).cpu)
    ms = {name: 1e3 * statistics.median(each[WARM_UP:]) for name, each in taken.items()}
    return {
        "cpu_ms": ms["kernel"],
        "whole_cpu_ms": ms["whole"],
        "numpy_cpu_ms": ms["numpy"],
        "ratio": ms["kernel"] / ms["numpy"],
    }


def _kernel(ps: Ps, dim: int) -> Callable[[Ids], None]:
    """Return what updates the rows with such ids by Adam: index, gather, rule and scatter."""
    store, length = ps.memory.stores[0], ps.memory.layout.tables[0].block_rows
    rows, m, v = scratch = list(np.empty((3, length * dim), np.float32))
    bound = Update(ADAM).bind(rows, {"m": m, "v": v})
    gradient = np.full(BATCH_ROWS * dim, 1e-3, np.float32)

    def update(ids: Ids) -> None:
        places, _ = store.find(ids)
        for begin in range(0, len(ids), length):
            own = places[begin : begin + length]
            store.gather(own, scratch)
            bound.apply(Mean([gradient[: len(own) * dim]]), 10)
            store.scatter(own, 10, scratch)

    return update


def _move(records: Floats, places: Ids) -> None:
    """Read and write rows and slots as NumPy does."""
    records[places] = np.take(records, places, axis=0)


def _random() -> np.random.Generator:
    return np.random.default_rng(0)


def _memory_mb() -> float:
    return memory_mb([os.getpid()]) or 0.0


def _timed(call: Callable[[], object]) -> Seconds:
    began_at, before = time.perf_counter(), time.thread_time()
    call()
    return Seconds(time.perf_counter() - began_at, time.thread_time() - before)
