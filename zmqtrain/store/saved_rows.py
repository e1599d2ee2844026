"""Rows of tables in a checkpoint, whatever shards wrote them, in the order of ids; whole tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from zmqtrain.errors import CheckpointError, ConfigError
from zmqtrain.files import check_regular
from zmqtrain.models.rows import kept
from zmqtrain.models.tables import Given, Ids, Initial, Normal, Rows, RowsOf, TableVariable, Uniform
from zmqtrain.store.manifest import Manifest, TableRecord
from zmqtrain.units import data_size

CHUNK = 1 << 16  # rows that are read at once


@contextmanager
def reading(file: Path) -> Iterator[Any]:
    """Yield the tensors of a file; turn errors of this context into a CheckpointError."""
    try:
        check_regular(file)
        yield safe_open(file, framework="np")
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(
            f"{file}: cannot be read: {error}; resume from another checkpoint"
        ) from error


class _Part(NamedTuple):
    """The rows of one file. ``first``: number of its first row among those of all files."""

    file: Path
    tensors: list[Any]
    first: int
    end: int


class SavedRows:
    """A choice of the rows of a table; at first all of them.

    ``ids``: sorted ids of the chosen rows. ``stamps``: the update that trained each of them last.
    ``version``: updates that each shard had made at least.
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        table: str,
        widths: Mapping[str, int],
        *,
        keys: tuple[str, str] = ("ids", "stamps"),
        own: Callable[[Ids], NDArray[np.bool_]] | None = None,
    ) -> None:
        """``widths``: elements of a row in each tensor to be read. ``keys``: names of the tensors
        of ids and stamps. ``own``: which ids count at all.

        Raises:
            CheckpointError: a file is damaged.
        """
        self._widths = widths
        self._parts: list[_Part] = []
        versions, end = [], 0
        found = [[np.empty(0, np.int64)] for _ in range(3)]  # ids, stamps, places
        for written in manifest.files:
            file = path / written.file
            with reading(file) as tensors:
                if not (slices := _slices(tensors, table, [*keys, *widths], widths)):
                    continue
                first, end = end, end + slices[0].get_shape()[0]
                self._parts.append(_Part(file, slices[2:], first, end))
                versions.append(written.version)
                for begin in range(0, end - first, CHUNK):
                    stop = min(begin + CHUNK, end - first)
                    ids, stamps = (each[begin:stop] for each in slices[:2])
                    chosen = np.flatnonzero(own(ids)) if own is not None else np.arange(len(ids))
                    block = ids[chosen], stamps[chosen], first + begin + chosen
                    for arrays, array in zip(found, block, strict=True):
                        arrays.append(array)
        self.ids, self.stamps, self._places = (np.concatenate(arrays) for arrays in found)
        self.version = min(versions, default=0)
        self._choose(np.argsort(self.ids))

    def choose(self, since: int = 0, most: int | None = None) -> None:
        """Choose the rows that an update after number ``since`` has trained, and of these the
        ``most`` that were trained last; of equals those with lower ids."""
        self._choose(np.flatnonzero(self.stamps > since))
        if most is not None and len(self.ids) > most:
            self._choose(np.sort(np.argsort(-self.stamps, kind="stable")[:most]))

    def blocks(self) -> Iterator[tuple[Ids, list[Rows]]]:
        """Yield the chosen ids, and their rows of each width.

        Raises:
            CheckpointError: a file cannot be read.
        """
        for begin in range(0, len(self.ids), CHUNK):
            places = self._places[begin : begin + CHUNK]
            rows = [np.empty((len(places), width), np.float32) for width in self._widths.values()]
            for part in self._parts:
                own = np.flatnonzero((places >= part.first) & (places < part.end))
                with reading(part.file):
                    for array, tensor in zip(rows, part.tensors, strict=True):
                        array[own] = _rows_at(tensor, places[own] - part.first)
            yield self.ids[begin : begin + CHUNK], rows

    def read(self) -> list[Rows]:
        """Return all chosen rows, of each width.

        Raises:
            CheckpointError: a file cannot be read.
        """
        found = [np.empty((len(self.ids), width), np.float32) for width in self._widths.values()]
        for number, (ids, rows) in enumerate(self.blocks()):
            for array, block in zip(found, rows, strict=True):
                array[number * CHUNK :][: len(ids)] = block
        return found

    def _choose(self, chosen: NDArray[np.int64]) -> None:
        self.ids, self.stamps = self.ids[chosen], self.stamps[chosen]
        self._places = self._places[chosen]


def _slices(tensors: Any, table: str, names: list[str], widths: Mapping[str, int]) -> list[Any]:
    """Return tensors of a table, to be read by slices; [] if the file has none."""
    keys = [f"/{name}/{table}" for name in names]
    if keys[0] not in tensors.keys():  # the file of frozen values, or counts that nobody kept
        return []
    found = [tensors.get_slice(key) for key in keys]
    for name, key, each in zip(names, keys, found, strict=True):
        shape = [found[0].get_shape()[0], *([widths[name]] if name in widths else [])]
        if each.get_shape() != shape:
            raise ValueError(f"{key!r} has shape {each.get_shape()}, expected {shape}")
    return found


def _rows_at(tensor: Any, places: NDArray[np.int64]) -> Rows:
    """Return rows by their ascending numbers, which may be far apart."""
    found, begin = np.empty((len(places), tensor.get_shape()[1]), np.float32), 0
    while begin < len(places):
        low = int(places[begin])
        end = int(np.searchsorted(places, low + CHUNK))
        found[begin:end] = tensor[low : int(places[end - 1]) + 1][places[begin:end] - low]
        begin = end
    return found


def initial_name(table: str) -> str:
    return f"/initial/{table}"


def record_of(path: Path, manifest: Manifest, table: str) -> TableRecord:
    """Return a checkpoint's record of a table.

    Raises:
        CheckpointError: it has no such table.
    """
    record = manifest.tables.get(table)
    if record is None and table in {each.name for each in manifest.variables()}:
        raise in_another_form(path, table)
    if record is None:
        raise CheckpointError(
            f"{path}: it has no table {table!r}; its tables: "
            f"{', '.join(manifest.tables) or 'none'}; expected one of these, or a new logdir for "
            "another model"
        )
    return record


def in_another_form(path: Path, name: str) -> CheckpointError:
    """Return an error about a variable that is a table in a checkpoint or in the job, not both."""
    return CheckpointError(
        f"{path} and the job have {name!r} once as a table and once as a whole variable; expected "
        "the same: a table cannot be frozen while its job goes on, nor a frozen one be trained; "
        "leave that as it was, or begin with these weights in a new logdir, by "
        f"Job(initial=zmqtrain.load({str(path.parent.parent)!r}))"
    )


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
            whole[name] = _whole(variable, record.rows, saved)
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
