"""What a shard owns at one version, read while later updates change it: for an evaluation."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from zmqtrain.compute.arrays import Flat
from zmqtrain.models.tables import Ids, Rows
from zmqtrain.store.table_layout import SWEEPS
from zmqtrain.store.table_memory import TableMemory


class KeptRows:
    """The rows of all tables as they are when this is made; the shard is idle then.

    Updates copy what they are about to change (see row_snapshot.py), as long as somebody has this.
    """

    def __init__(self, memory: TableMemory) -> None:
        self._memory = memory
        self._snapshots = [store.freeze() for store in memory.stores]
        self._sweeps = [store.words[SWEEPS] for store in memory.stores]

    def read(self, table: int, ids: Ids) -> Rows:
        """Return the rows with these ids as they were, shape (n, dim).

        Raises:
            CheckpointError: the shard has begun anew.
        """
        store, snapshot = self._memory.stores[table], self._snapshots[table]
        places, _ = store.find(ids)
        forgets = store.words[SWEEPS] != self._sweeps[table]
        if snapshot.is_for_others:  # what they forget may be seen earlier than SWEEPS
            variable = self._memory.layout.tables[table].variable
            forgets = variable.forget_after is not None or variable.max_rows is not None
        rows, is_there = snapshot.read(ids, places, forgets=forgets)
        self._memory.begin_rows(table, ids, rows, np.flatnonzero(~is_there))
        return rows


class Kept(NamedTuple):
    """A version of a shard. ``parameters``: those that it owns, or their moving averages."""

    version: int
    parameters: Flat
    rows: KeptRows | None  # None: it has no tables
