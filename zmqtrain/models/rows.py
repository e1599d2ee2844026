"""The rows that a step reads and trains, between a model and an exchange.

A model finds a :class:`TableReader` in place of a table among its parameters, and a
:class:`RowGradient` in place of its buffer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zmqtrain.errors import ConfigError, DataError
from zmqtrain.models.tables import Ids, Rows, RowsOf, TableVariable, Trained


class RowSource(ABC):
    """A source of rows, for a thread that may block; by default no read does."""

    @property
    def may_wait(self) -> bool:
        """Whether :meth:`read` needs the event loop, so that its thread must be another one."""
        return False

    @abstractmethod
    def read(self, wanted: Sequence[tuple[int, Ids]]) -> list[Rows]:
        """Return the current rows of (table, sorted unique ids), in one request to each shard.

        Raises:
            FencedError, PeerLostError: a shard has a new life, or is lost; or the task ends.
        """

    def exact(self) -> RowSource:
        """Return a source of the same rows without compression, which is closed with this one."""
        return self

    def close(self) -> None:
        """End the reads that are under way, and refuse later ones: the task ends."""


class InitialRows(RowSource):
    """Rows as they are before any training."""

    def __init__(self, tables: Sequence[TableVariable]) -> None:
        self._tables = tables

    def read(self, wanted: Sequence[tuple[int, Ids]]) -> list[Rows]:
        return [self._tables[table].initial_rows(ids) for table, ids in wanted]


class TableReader:
    """A table among the parameters of a step."""

    def __init__(self, variable: TableVariable, source: RowSource) -> None:
        self.variable = variable
        self._source = source
        self._known: tuple[Ids, Rows] | None = None

    @property
    def trained(self) -> RowsOf | None:
        """Ids and rows of all trained rows, after a run or of a checkpoint; None during a run."""
        initial = self.variable.initial
        return initial.of if isinstance(initial, Trained) else None

    @property
    def source(self) -> RowSource:
        return self._source

    def exact(self) -> TableReader:
        """Return a new reader of the same rows without compression."""
        return TableReader(self.variable, self._source.exact())

    @property
    def known(self) -> RowsOf | None:
        """The rows that the step has read; None: it has read none."""
        return None if self._known is None else RowsOf(self.variable.number, *self._known)

    def begin(self) -> None:
        """Forget the rows of the last step."""
        self._known = None

    def provide(self, ids: Ids, rows: Rows) -> None:
        """Keep rows that were read ahead; ``ids`` are sorted and unique."""
        self._known = ids, rows

    def take(self, ids: Any) -> NDArray[np.float32]:
        """Return the rows with these ids: integers of any shape; the result has shape (*, dim).

        Raises:
            DataError: an id is not an integer, or not one of the table's.
        """
        unique, places = unique_ids(self.variable, ids)
        return self.rows(unique)[places]

    def whole(self) -> Rows:
        """Return all rows, shape (rows, dim), of a table with a known number of rows."""
        assert self.variable.rows is not None
        return self._source.read([(self.variable.number, np.arange(self.variable.rows))])[0]

    def rows(self, unique: Ids) -> Rows:
        """Return the rows with these sorted unique ids; those that the step has read are kept."""
        if self._known is None:
            self._known = unique, self._source.read([(self.variable.number, unique)])[0]
            return self._known[1]
        known, rows = self._known
        if known is unique:
            return rows
        at = np.searchsorted(known, unique)
        is_known = np.zeros(len(unique), bool)
        is_known[at < len(known)] = known[at[at < len(known)]] == unique[at < len(known)]
        if not is_known.all():
            missing = unique[~is_known]
            read = self._source.read([(self.variable.number, missing)])[0]
            every = np.concatenate([known, missing])
            order = np.argsort(every)
            known, rows = self._known = every[order], np.concatenate([rows, read])[order]
            at = np.searchsorted(known, unique)
        return rows if len(known) == len(unique) else rows[at]


class RowGradient:
    """The gradient of a table in a step: rows are added up by id, in the order of the calls."""

    def __init__(self, variable: TableVariable) -> None:
        self.variable = variable
        self._parts: list[tuple[Ids, Rows]] = []

    def begin(self) -> None:
        self._parts.clear()

    def add(self, ids: Any, rows: Any) -> None:
        """Add the gradient of rows: ``ids`` of any shape, ``rows`` float32 of shape (*, dim).

        Raises:
            DataError: an id is not an integer, or not one of the table's.
            ConfigError: the shapes do not fit.
        """
        unique, places = unique_ids(self.variable, ids)
        given = np.ascontiguousarray(rows, np.float32)
        if given.shape != (*places.shape, self.variable.dim):
            raise ConfigError(
                f"a gradient of rows of {self.variable.name!r} has shape {given.shape}; expected "
                f"{(*places.shape, self.variable.dim)}, a row for each id"
            )
        self.add_unique(unique, summed(len(unique), places.ravel(), given))

    def add_unique(self, ids: Ids, rows: Rows) -> None:
        """Do the same for ids that are sorted and unique, and rows that are float32."""
        self._parts.append((ids, rows))

    def result(self) -> RowsOf | None:
        """Return the whole gradient; None if the step has read no row."""
        if not self._parts:
            return None
        ids, rows = self._parts[0]
        if len(self._parts) > 1:
            every = np.concatenate([part for part, _ in self._parts])
            ids, places = np.unique(every, return_inverse=True)
            rows = summed(len(ids), places, np.concatenate([rows for _, rows in self._parts]))
        return RowsOf(self.variable.number, ids, rows)


def readers_of(
    tables: Sequence[TableVariable], source: RowSource | None = None
) -> dict[str, TableReader]:
    """Return a reader of each table by name; without a source, of rows before any training."""
    return {table.name: TableReader(table, source or InitialRows(tables)) for table in tables}


def kept(tables: Sequence[TableVariable], trained: Iterable[RowsOf]) -> dict[str, TableReader]:
    """Return readers, by name, of the tables whose trained rows are given."""
    found = {rows.table: rows for rows in trained}
    ended = [
        replace(table, initial=Trained(found[table.number], table))
        if table.number in found
        else table
        for table in tables
    ]
    source = InitialRows(ended)
    return {table.name: TableReader(table, source) for table in ended if table.number in found}


def read_ahead(wanted: Sequence[tuple[TableReader, Ids]]) -> None:
    """Read rows of several tables in one request, for the step that has begun.

    ``wanted``: at most once for each table; ids are sorted and unique.
    """
    if wanted:
        source = wanted[0][0].source
        found = source.read([(reader.variable.number, ids) for reader, ids in wanted])
        for (reader, ids), rows in zip(wanted, found, strict=True):
            reader.provide(ids, rows)


def unique_ids(variable: TableVariable, ids: Any) -> tuple[Ids, NDArray[np.int64]]:
    """Return the sorted unique ids, and for each id its place among them, in its shape.

    Raises:
        DataError: an id is not an integer, or not one of the table's.
    """
    given = whole_numbers(variable, ids)
    unique, places = np.unique(given, return_inverse=True)
    check_ids(variable, unique)
    return unique, places.reshape(given.shape)


def whole_numbers(variable: TableVariable, ids: Any) -> Ids:
    """Return ids, of any shape, as int64.

    Raises:
        DataError: they are not integers, or do not fit.
    """
    given = np.asarray(ids)
    if given.dtype.kind not in "iu" and given.size:  # a list of nothing is float64
        raise DataError(
            f"ids of the table {variable.name!r} are {given.dtype}; expected integers: convert "
            "them in the data"
        )
    if given.dtype == np.uint64 and given.size and given.max() >= 1 << 63:
        raise DataError(
            f"the table {variable.name!r} is given id {given.max()}; expected ids below 2^63: view "
            "them as int64 in the data"
        )
    return given.astype(np.int64, copy=False)


def check_ids(variable: TableVariable, unique: Ids) -> None:
    """
    Raises:
        DataError: one of these sorted ids is none of the table's.
    """
    if len(unique) and variable.rows is not None:
        for id_ in (unique[0], unique[-1]):
            if not 0 <= id_ < variable.rows:
                raise DataError(
                    f"the table {variable.name!r} has {variable.rows} rows, but the batch has id "
                    f"{id_}; expected 0 to {variable.rows - 1}: correct the data, give the table "
                    "more rows, or rows=None, which takes any id"
                )


def summed(count: int, places: NDArray[np.int64], rows: Rows) -> Rows:
    """Return the sums of the rows that belong to each of ``count`` places, in their order."""
    if len(rows) == count and (places == np.arange(count)).all():
        return rows.reshape(count, rows.shape[-1])
    total = np.zeros((count, rows.shape[-1]), np.float32)
    np.add.at(total, places, rows.reshape(len(places), -1))
    return total
