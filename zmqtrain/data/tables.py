"""Tables: CSV and Parquet files, and tables that pandas, Arrow or Hugging Face datasets hold.

Examples are rows. ``inputs`` and ``target`` name columns; a batch is the inputs, then the target.
One name is one array. Of several names, columns of numbers become one float32 array
(n, columns), and columns of lists an array each. Without ``inputs`` all other columns count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from zmqtrain.data.arrays import ArrayDataset
from zmqtrain.data.files import Paths, files_of, reading
from zmqtrain.errors import DataError, did_you_mean, imported
from zmqtrain.models.base import Array, Batch

if TYPE_CHECKING:
    import pyarrow

Names: TypeAlias = str | Sequence[str] | None
"""One column, several, or (None) for inputs all others, for a target none."""


class _InMemory:
    """A table that is converted to arrays once."""

    @cached_property
    def _arrays(self) -> ArrayDataset:
        return ArrayDataset(*self._read())

    def _read(self) -> Batch:
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self._arrays)

    def take(self, indices: Array) -> Batch:
        """Return these rows.

        Raises:
            ConfigError: pyarrow is not installed.
            DataError: a file cannot be read, or a column is missing, has gaps or holds no numbers.
        """
        return self._arrays.take(indices)


@dataclass(frozen=True, eq=False)
class Table(_InMemory):
    """Examples in a pandas DataFrame or an Arrow table."""

    table: Any
    inputs: Names = None
    target: Names = None

    def _read(self) -> Batch:
        arrow, table = imported("pyarrow", "data"), self.table
        if not isinstance(table, arrow.Table):
            table = arrow.Table.from_pandas(table, preserve_index=False)
        return _batch(table, Columns(table.column_names, self.inputs, self.target, "the table"))

    def __repr__(self) -> str:
        return f"Table({type(self.table).__name__}, {self.inputs!r}, {self.target!r})"


@dataclass(frozen=True, eq=False)
class CSV(_InMemory):
    """Examples in CSV files, whose first line names the columns; read once into memory.

    ``paths``: a file, a pattern such as ``data/*.csv``, or a list of them.
    """

    paths: Paths
    inputs: Names = None
    target: Names = None
    delimiter: str = ","

    def _read(self) -> Batch:
        arrow, csv = imported("pyarrow", "data"), imported("pyarrow.csv", "data")
        files = files_of(self.paths)
        options = csv.ParseOptions(delimiter=self.delimiter)
        tables = []
        for file in files:
            with reading(file):
                tables.append(csv.read_csv(file, parse_options=options))
            if missing := set(tables[0].column_names) ^ set(tables[-1].column_names):
                raise DataError(
                    f"{file} and {files[0]} differ in the columns {', '.join(sorted(missing))}; "
                    "expected the same in every file"
                )
        columns = Columns(tables[0].column_names, self.inputs, self.target, str(files[0]))
        tables = [table.select(columns.names) for table in tables]
        return _batch(arrow.concat_tables(tables, promote_options="permissive"), columns)


@dataclass(frozen=True, eq=False)
class Parquet:
    """Examples in Parquet files, whose row groups are read when they are asked for.

    ``paths``: a file, a pattern such as ``data/*.parquet``, or a list of them. Up to
    ``memory_nbytes`` of rows stay in memory. Batches are drawn from all rows, so larger data is
    better read once into a directory: ``Cached(Parquet(...), directory)``.
    """

    paths: Paths
    inputs: Names = None
    target: Names = None
    memory_nbytes: int = 1 << 30
    _kept: dict[int, Batch] = field(default_factory=dict, init=False, repr=False)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def take(self, indices: Array) -> Batch:
        """Return these rows.

        Raises:
            ConfigError: pyarrow is not installed.
            DataError: a file cannot be read, or a column is missing, has gaps or holds no numbers.
        """
        indices = np.asarray(indices)
        groups = np.searchsorted(self._starts, indices, side="right") - 1
        batch: Batch = ()
        for group in np.unique(groups).tolist():
            places = np.flatnonzero(groups == group)
            arrays = self._read(group)
            if not batch:
                batch = tuple(np.empty((len(indices), *a.shape[1:]), a.dtype) for a in arrays)
            for rows, array in zip(batch, arrays, strict=True):
                rows[places] = array[indices[places] - self._starts[group]]
        return batch

    @cached_property
    def _groups(self) -> list[tuple[Path, int, int]]:
        """File, number and rows of each row group."""
        parquet = imported("pyarrow.parquet", "data")
        groups = []
        for file in files_of(self.paths):
            with reading(file):
                of_file = parquet.ParquetFile(file).metadata
            counts = [of_file.row_group(n).num_rows for n in range(of_file.num_row_groups)]
            groups += [(file, number, count) for number, count in enumerate(counts)]
        return groups

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        """The first row of each row group, and the number of rows."""
        return np.cumsum([0, *(rows for _, _, rows in self._groups)])

    def _read(self, group: int) -> Batch:
        """Return a row group; the last ones that were read stay in memory."""
        from pyarrow import parquet

        arrays = self._kept.pop(group, None)
        if arrays is None:
            path, number, rows = self._groups[group]
            where = f"{path}, row group {number}"
            with reading(where):
                file = parquet.ParquetFile(path)
                columns = Columns(file.schema_arrow.names, self.inputs, self.target, str(path))
                table = file.read_row_group(number, columns.names)
            if len(table) != rows:
                raise DataError(
                    f"{where} has {len(table)} rows, and had {rows} when the job began; data must "
                    "stay as it is while it trains; start the task again"
                )
            arrays = _batch(table, columns)
            self._make_room(arrays)
        self._kept[group] = arrays  # the last one
        return arrays

    def _make_room(self, arrays: Batch) -> None:
        used = sum(map(_nbytes, [arrays, *self._kept.copy().values()]))
        for group in list(self._kept):
            if used > self.memory_nbytes:
                used -= _nbytes(self._kept.pop(group, ()))


@dataclass(frozen=True, eq=False)
class HuggingFace:
    """Examples in a data set of Hugging Face's ``datasets`` that has a length."""

    dataset: Any
    inputs: Names = None
    target: Names = None

    def __len__(self) -> int:
        return len(self.dataset)

    def take(self, indices: Array) -> Batch:
        """Return these rows; a transform that was set stays in force.

        Raises:
            DataError: a column is missing or holds no numbers.
        """
        dataset = self.dataset
        if dataset.format["type"] != "custom":
            dataset = dataset.with_format("numpy")
        rows = dataset[np.asarray(indices).tolist()]
        columns = Columns(list(rows), self.inputs, self.target, "the data set")
        return columns.batch(lambda name: np.asarray(rows[name]))

    def __repr__(self) -> str:
        return f"HuggingFace({len(self)} rows, {self.inputs!r}, {self.target!r})"


class Columns:
    """Which columns make the arrays of a batch."""

    def __init__(self, available: Sequence[str], inputs: Names, target: Names, where: str) -> None:
        """
        Raises:
            DataError: a column is missing; ``where`` says in what.
        """
        last = [] if target is None else [target]
        if inputs is None:
            inputs = [n for n in available if n != target and n not in (target or ())]
        self._groups = [inputs, *last]
        self._where = where
        for name in self.names:
            if name not in available:
                raise DataError(
                    f"{where} has no column {name!r}; it has {', '.join(available)}"
                    f"{did_you_mean(name, available)}"
                )

    @property
    def names(self) -> list[str]:
        """All names, in order."""
        return [n for group in self._groups for n in ([group] if isinstance(group, str) else group)]

    def batch(self, column: Callable[[str], NDArray[Any]]) -> Batch:
        """Return the columns as a batch: one array, or one after another.

        Raises:
            DataError: a column holds no numbers.
        """
        batch: list[NDArray[Any]] = []
        for group in self._groups:
            names = [group] if isinstance(group, str) else group
            arrays = [self._numbers(name, column(name)) for name in names]
            if not isinstance(group, str) and all(array.ndim == 1 for array in arrays):
                arrays = [np.stack(arrays, axis=1).astype(np.float32)]
            batch += arrays
        return tuple(batch)

    def _numbers(self, name: str, array: NDArray[Any]) -> NDArray[Any]:
        """Return floats as float32, single integers as int64, arrays of integers as they are."""
        if array.dtype.kind not in "biuf":
            raise DataError(
                f"column {name!r} of {self._where} holds {array.dtype}, such as "
                f"{array.ravel()[:1].tolist()}; expected numbers, or lists of one length: leave it "
                "out, or give its values numbers first"
            )
        if array.dtype.kind == "f":
            return array.astype(np.float32, copy=False)
        return array.astype(np.int64, copy=False) if array.ndim == 1 else array


def _batch(table: pyarrow.Table, columns: Columns) -> Batch:
    return columns.batch(lambda name: _array(table.column(name).combine_chunks(), name))


def _array(column: pyarrow.Array, name: str) -> NDArray[Any]:
    """Return an Arrow column as an array, one of lists as (rows, length, ...).

    Raises:
        DataError: a value is missing, or lists have different lengths.
    """
    if column.null_count:
        row = column.is_null().index(True).as_py()
        raise DataError(
            f"column {name!r} has {column.null_count} empty values, the first in row {row}; "
            "expected a number in each row; fill them in, or leave these rows out"
        )
    if not hasattr(column, "flatten") or not hasattr(column.type, "value_type"):
        return np.asarray(column.to_numpy(zero_copy_only=False))
    flat = _array(column.flatten(), name)
    lengths = set(column.value_lengths().to_pylist())
    if len(lengths) > 1:
        raise DataError(
            f"column {name!r} has lists of {min(lengths)} to {max(lengths)} values; expected one "
            "length: cut or pad them"
        )
    return flat.reshape(len(column), *lengths, *flat.shape[1:])


def _nbytes(arrays: Batch) -> int:
    return sum(int(array.nbytes) for array in arrays)
