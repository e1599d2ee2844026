"""Tables of a checkpoint, read without a cluster, in the order of ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import psutil

from zmqtrain.errors import CheckpointError, ConfigError
from zmqtrain.models.rows import kept
from zmqtrain.models.tables import Given, Ids, Initial, Normal, Rows, RowsOf, TableVariable, Uniform
from zmqtrain.store.manifest import Manifest, TableRecord
from zmqtrain.store.saved_rows import CHUNK, SavedRows, reading
from zmqtrain.store.table_checkpoint import initial_name, record_of
from zmqtrain.units import data_size


def saved_rows(path: Path, manifest: Manifest, table: str) -> SavedRows:
    """Return the trained rows of a table in a checkpoint, without slots.

    Raises:
        CheckpointError: it has no such table, or a file is damaged.
    """
    return SavedRows(path, manifest, table, {"rows": record_of(path, manifest, table).dim})


def load_tables(path: Path, manifest: Manifest) -> dict[str, Any]:
    """Return the tables of a checkpoint by name.

    A table of N rows is an array of shape (N, dim), in which rows that were never trained have
    their initial values. A table of any id is a TableReader, whose ``trained`` has ids and rows; so
    is one whose initial values come from a class of the job's own, which no checkpoint has.

    Raises:
        CheckpointError: a file is damaged, or this host has no memory for a table.
    """
    whole: dict[str, Any] = {}
    variables: list[TableVariable] = []
    others: list[RowsOf] = []
    for number, (name, record) in enumerate(manifest.tables.items()):
        saved, initial = saved_rows(path, manifest, name), _initial_of(path, manifest, name)
        variable = TableVariable(name, number, record.dim, record.rows, initial, key=record.key)
        variables.append(variable)
        if record.rows is not None and not isinstance(initial, _Unknown):
            whole[name] = _whole(variables[-1], record.rows, saved)
        else:
            _check_room(name, len(saved.ids), record.dim)
            others.append(RowsOf(number, saved.ids, saved.read()[0]))
    return whole | kept(variables, others)


def _whole(variable: TableVariable, count: int, saved: SavedRows) -> Rows:
    if len(saved.ids) and not 0 <= saved.ids[0] <= saved.ids[-1] < count:
        raise CheckpointError(
            f"the table {variable.name!r} has ids from {saved.ids[0]} to {saved.ids[-1]} in the "
            f"checkpoint; expected 0 to {count - 1}; resume from another checkpoint"
        )
    _check_room(variable.name, count, variable.dim)
    rows = np.empty((count, variable.dim), np.float32)
    for begin in range(0, count, CHUNK):
        ids = np.arange(begin, min(begin + CHUNK, count))
        rows[ids] = variable.initial_rows(ids)
    for ids, (block,) in saved.blocks():
        rows[ids] = block
    return rows


def _check_room(name: str, count: int, dim: int) -> None:
    needed, available = 4 * count * dim, psutil.virtual_memory().available
    if needed > available:
        raise CheckpointError(
            f"the table {name!r} has {count} rows of {dim}, {data_size(needed)}; this host has "
            f"{data_size(available)} of memory left; zmqtrain export --table {name} needs less"
        )


class _Unknown:
    """Initial values of a class of the job's own."""

    def rows(self, key: int, ids: Ids, dim: int) -> Rows:
        raise ConfigError(
            f"the checkpoint has no row for {len(ids)} of the ids, such as {ids[0]}, and their "
            "initial values come from a class of the job's own; ask for trained ids only"
        )


def _initial_of(path: Path, manifest: Manifest, name: str) -> Initial:
    record: TableRecord = manifest.tables[name]
    match record.initial:
        case "uniform":
            return Uniform(record.scale)
        case "normal":
            return Normal(record.scale)
        case "given":
            for written in manifest.files:
                with reading(path / written.file) as tensors:
                    if initial_name(name) in tensors.keys():
                        return Given(tensors.get_tensor(initial_name(name)))
    return _Unknown()
