"""Tables of a checkpoint, read without a cluster, in the order of ids."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
from numpy.typing import NDArray
from safetensors import safe_open

from zmqtrain.errors import CheckpointError, ConfigError
from zmqtrain.models.rows import kept
from zmqtrain.models.tables import Given, Ids, Initial, Normal, Rows, RowsOf, TableVariable, Uniform
from zmqtrain.store.manifest import Manifest, TableRecord
from zmqtrain.store.table_checkpoint import initial_name, readable, record_of, slices_of
from zmqtrain.units import data_size

_CHUNK = 1 << 16  # rows that are in memory at once


class _Part(NamedTuple):
    """The rows that one shard has written. ``first``: number of its first row among all."""

    file: Path
    rows: Any
    first: int
    end: int

    def read(self, places: NDArray[np.int64]) -> Rows:
        """Return rows by their ascending numbers."""
        found, begin = np.empty((len(places), self.rows.get_shape()[1]), np.float32), 0
        places = places - self.first
        while begin < len(places):
            low = int(places[begin])
            end = int(np.searchsorted(places, low + _CHUNK))
            with readable(self.file):
                near = self.rows[low : int(places[end - 1]) + 1]
            found[begin:end] = near[places[begin:end] - low]
            begin = end
        return found


class SavedRows:
    """The trained rows of a table in a checkpoint, of which some are chosen: first all.

    ``ids``: of those, sorted. ``version``: updates that all shards had made of it at least.
    """

    def __init__(self, path: Path, manifest: Manifest, name: str) -> None:
        """``manifest`` comes from ``read_manifest(path)``, and ``verify`` has passed.

        Raises:
            CheckpointError: it has no such table, or a file is damaged.
        """
        self.record = record_of(path, manifest, name)
        self._parts: list[_Part] = []
        ids, stamps, versions, end = [np.empty(0, np.int64)], [np.empty(0, np.int64)], [0], 0
        for written in manifest.files:
            file = path / written.file
            with readable(file):
                tensors = safe_open(file, framework="np")
                widths = {"ids": 0, "stamps": 0, "rows": self.record.dim}
                if found := slices_of(tensors, name, widths):
                    ids.append(found[0][:])
                    stamps.append(found[1][:])
                    versions.append(written.version)
                    self._parts.append(_Part(file, found[2], end, end := end + len(ids[-1])))
        every = np.concatenate(ids)
        self._places = np.argsort(every)
        self._stamps = np.concatenate(stamps)[self._places]
        self.ids: Ids = every[self._places]
        self.version = min(versions[1:], default=0)

    def choose(self, since: int = 0, most: int | None = None) -> None:
        """Choose the rows that an update after number ``since`` has trained, and of these the
        ``most`` that were trained last, by lower ids if these are as many."""
        chosen = np.flatnonzero(self._stamps > since)
        if most is not None and len(chosen) > most:
            newest = np.argsort(-self._stamps[chosen], kind="stable")[:most]
            chosen = np.sort(chosen[newest])
        self.ids, self._stamps = self.ids[chosen], self._stamps[chosen]
        self._places = self._places[chosen]

    def blocks(self) -> Iterator[tuple[Ids, Rows]]:
        """Yield the chosen rows by their ids.

        Raises:
            CheckpointError: a file cannot be read.
        """
        for begin in range(0, len(self.ids), _CHUNK):
            places = self._places[begin : begin + _CHUNK]
            rows = np.empty((len(places), self.record.dim), np.float32)
            for part in self._parts:
                own = np.flatnonzero((places >= part.first) & (places < part.end))
                rows[own] = part.read(places[own])
            yield self.ids[begin : begin + _CHUNK], rows


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
        saved, initial = SavedRows(path, manifest, name), _initial_of(path, manifest, name)
        given = name, number, record.dim, record.rows, initial, record.key
        variables.append(TableVariable(*given))
        if record.rows is not None and not isinstance(initial, _Unknown):
            whole[name] = _whole(variables[-1], record.rows, saved)
        else:
            rows = _room(name, len(saved.ids), record.dim)
            for begin, (_, block) in enumerate(saved.blocks()):
                rows[begin * _CHUNK :][: len(block)] = block
            others.append(RowsOf(number, saved.ids, rows))
    return whole | kept(variables, others)


def _whole(variable: TableVariable, count: int, saved: SavedRows) -> Rows:
    if len(saved.ids) and not 0 <= saved.ids[0] <= saved.ids[-1] < count:
        raise CheckpointError(
            f"the table {variable.name!r} has ids from {saved.ids[0]} to {saved.ids[-1]} in the "
            f"checkpoint; expected 0 to {count - 1}; resume from another checkpoint"
        )
    rows = _room(variable.name, count, variable.dim)
    for begin in range(0, count, _CHUNK):
        ids = np.arange(begin, min(begin + _CHUNK, count))
        rows[ids] = variable.initial_rows(ids)
    for ids, block in saved.blocks():
        rows[ids] = block
    return rows


def _room(name: str, count: int, dim: int) -> Rows:
    needed, available = 4 * count * dim, psutil.virtual_memory().available
    if needed > available:
        raise CheckpointError(
            f"the table {name!r} has {count} rows of {dim}, {data_size(needed)}; this host has "
            f"{data_size(available)} of memory left; zmqtrain export --table {name} needs less"
        )
    return np.empty((count, dim), np.float32)


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
                with readable(path / written.file):
                    tensors: Any = safe_open(path / written.file, framework="np")
                    if initial_name(name) in tensors.keys():
                        return Given(tensors.get_tensor(initial_name(name)))
    return _Unknown()
