"""A shard with tables, in files or private, and pushes of rows for it.

``python -m tests.store.with_tables PATH`` goes on with the shard at PATH and prints "begun" after
an update, until it is killed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zmqtrain.models.tables import RowPlace, RowsOf, TableVariable, Uniform, key_of
from zmqtrain.optim import LAMB, Adam, RowwiseAdagrad, Update
from zmqtrain.protocol.orders import Accumulate, Apply, Reduce
from zmqtrain.store.holdings.tables import Tables
from zmqtrain.store.layout import ShardLayout, Variable
from zmqtrain.store.placement import place, with_copies
from zmqtrain.store.segment import Segment
from zmqtrain.store.segment_files import tables_directory
from zmqtrain.store.segment_layout import PART_SIZE
from zmqtrain.store.shard import Shard, segment_layout
from zmqtrain.store.table_checkpoint import FrozenTable
from zmqtrain.store.table_layout import TableLayout, table_layouts
from zmqtrain.store.table_memory import TableMemory

EXTREMES = (0, -1, 2**63 - 1, -(2**63))
DENSE = Update(Adam(0.1))
VARIABLES = (Variable("b", (3,)),)
WHOLE = 1 << 40
(LAYOUT,) = place(VARIABLES, 1, partition_nbytes=WHOLE)


def table(name: str, number: int = 0, dim: int = 4, **options: Any) -> TableVariable:
    given = {"rows": None, "initial": Uniform(0.05), "key": key_of(1, name)} | options
    return TableVariable(name, number, dim, **given)


class Job:
    """Tables, their updates, and the batch size that a gradient's weight is a multiple of."""

    def __init__(
        self,
        tables: Sequence[TableVariable],
        updates: Sequence[Update],
        update: Update = DENSE,
        layout: ShardLayout = LAYOUT,
        threads: int = 1,
    ) -> None:
        self.tables, self.updates, self.update = tables, updates, update
        self.layout, self.threads = layout, threads

    @property
    def layouts(self) -> tuple[TableLayout, ...]:
        return table_layouts(self.tables, self.updates)

    def begin(self, path: Path | None = None) -> Shard:
        """Make a shard; ``path``: of its segment."""
        of = segment_layout(self.layout, self.update)
        if path is None:
            shard = self._shard(Segment.private(of), TableMemory.private(self.layouts))
        else:
            segment = Segment.create(of, path)
            memory = TableMemory.create(self.layouts, tables_directory(path))
            shard = self._shard(segment, memory)
        shard.initialize(np.zeros(self.layout.size, np.float32))
        return shard

    def adopt(self, path: Path) -> Shard:
        """Take over what a killed process left, and finish its last change."""
        segment = Segment.adopt(segment_layout(self.layout, self.update), path)
        memory = TableMemory.adopt(self.layouts, tables_directory(path))
        assert segment is not None
        assert memory is not None
        shard = self._shard(segment, memory)
        shard.repair()
        return shard

    def _shard(self, segment: Segment, memory: TableMemory) -> Shard:
        tables = Tables(self.updates, memory)
        given, options = (self.layout, self.update, segment), {"safe": True, "batch_size": 4}
        return Shard(*given, **options, threads=self.threads, tables=tables)

    def shards(self, count: int, copies: int = 1) -> list[Shard]:
        """Make so many shards in private memory."""
        made, placed = [], place(VARIABLES, count, partition_nbytes=WHOLE)
        for layout in with_copies(placed, copies, has_tables=True):
            memory = TableMemory.private(self.layouts)
            own = Tables(self.updates, memory, RowPlace(layout.shard, count, copies))
            made.append(Shard(layout, self.update, batch_size=4, tables=own))
        return made

    def contents(self, shard: Shard) -> tuple[Any, ...]:
        """Return all that a checkpoint would have, and what says how far the shard is."""
        tensors = {}
        assert shard.tables is not None
        for name, array in (tensors_of(shard) | shard.dense.tensors(self.layout)).items():
            tensors[name] = (array.shape, array.tobytes())
        return shard.version, shard.accumulated, tensors


def tensors_of(shard: Shard, layout: ShardLayout | None = None) -> dict[str, NDArray[Any]]:
    """Return what a checkpoint would have of a shard's tables; ``layout``: says of which rows."""
    assert shard.tables is not None
    return collected(shard.tables.freeze(layout or shard.layout))


def collected(frozen: Sequence[FrozenTable]) -> dict[str, NDArray[Any]]:
    shapes = chain(*(one.shapes.items() for one in frozen))
    found = {name: np.full(shape, 77, dtype) for name, (dtype, shape) in shapes}

    def write(name: str, rows: NDArray[Any], at: int) -> None:
        found[name][at : at + len(rows)] = rows

    for one in frozen:
        one.write(write)
    return found


def close(shard: Shard) -> None:
    """Close a shard's files as the end of a process does."""
    assert shard.tables is not None
    shard.segment.close()
    shard.tables.memory.close()


def remove(shard: Shard) -> None:
    assert shard.tables is not None
    shard.segment.remove()
    shard.tables.memory.remove()


def rows(
    table: TableVariable, seed: int, ids: Sequence[int] | None = None, most: int = 12
) -> RowsOf:
    """Return some rows of a gradient, with zeros of both signs among their elements."""
    random = np.random.default_rng([seed, table.number])
    if ids is None:
        ids = [*random.choice(2 * most, most, replace=False).tolist(), *EXTREMES]
    chosen = np.unique(np.array(ids, np.int64))
    values = random.standard_normal((len(chosen), table.dim), np.float32)
    values[random.random(values.shape) < 0.2] = -0.0
    return RowsOf(table.number, chosen, values)


def push(
    shard: Shard, worker: int, parts: Sequence[RowsOf], weight: float = 4, seed: int = 0
) -> None:
    """Stage a gradient of a worker."""
    assert shard.tables is not None
    shard.segment.gradient(worker)[:] = seed
    shard.tables.memory.buffer(worker).write(parts)
    shard.stage(worker, worker, seed, weight)


BIG = Variable("w", (2 * PART_SIZE,)), Variable("v", (9,))
KILLED = Job(
    [table("user", 0, 16), table("item", 1, 8)],
    [Update(Adam(0.01)), Update(RowwiseAdagrad(0.05))],
    Update(Adam(0.01), groups={"w": {"optimizer": LAMB(0.01)}}),
    place(BIG, 1, partition_nbytes=WHOLE)[0],
    threads=2,
)
"""What killed processes train: some blocks, growth of the index, and two dense parts."""


def update(shard: Shard) -> None:
    """Do the next update of that; its rows follow from its number."""
    version = shard.version
    random = np.random.default_rng(version)
    for worker in range(2):
        ids = [random.integers(0, 60_000, 5000) for _ in KILLED.tables]
        parts = [rows(of, version, own) for of, own in zip(KILLED.tables, ids, strict=True)]
        push(shard, worker, parts, seed=version)
    if version % 2:
        shard.carry_out(Apply(0))
    else:
        if not shard.accumulated:  # else it was killed behind this
            shard.carry_out(Accumulate(1))
        shard.carry_out(Reduce((0, 1)))


if __name__ == "__main__":
    adopted = KILLED.adopt(Path(sys.argv[1]))
    update(adopted)
    sys.stdout.write("begun\n")
    sys.stdout.flush()
    parent = os.getppid()
    while os.getppid() == parent:
        update(adopted)
