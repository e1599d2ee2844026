"""Tables: CSV and Parquet files, and tables that pandas, Arrow or Hugging Face datasets hold.

Examples are rows. ``inputs`` and ``target`` name columns; a batch is the inputs, then the target.
One name is one array. Of several names, columns of numbers become one float32 array
(n, columns), and columns of lists an array each. Without ``inputs`` all other columns count.

All files of a data set have one schema: columns are found by name, in the order of the first file,
and have one dtype. Floats are rounded to float32; a whole number that does not fit is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zmqtrain.data.arrays import ArrayDataset
from zmqtrain.data.collate import Collate, collated
from zmqtrain.data.columns import Choice, Columns, Names, numbers
from zmqtrain.data.exact import concatenated, exact, plain
from zmqtrain.data.files import Files, Paths, reading
from zmqtrain.data.subset import Seeded
from zmqtrain.errors import DataError
from zmqtrain.hints import imported
from zmqtrain.models.base import Array, Batch

if TYPE_CHECKING:
    import pyarrow


class _InMemory:
    """A table that becomes arrays once."""

    @cached_property
    def _arrays(self) -> ArrayDataset:
        return ArrayDataset(*self._read())

    def _read(self) -> Batch:
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self._arrays)

    def take(self, indices: Array) -> Batch:
        return self._arrays.take(indices)


@dataclass(frozen=True, eq=False)
class Frame(_InMemory):
    """Examples in a DataFrame of pandas or polars, or in an Arrow table."""

    table: Any
    inputs: Names = None
    target: Names = None

    def _read(self) -> Batch:
        where = "the table"
        table = _arrow(self.table, self.inputs, self.target, where)
        return Columns([(where, table.schema)], self.inputs, self.target).batch(table, where)

    def __repr__(self) -> str:
        return f"Frame({type(self.table).__name__}, {self.inputs!r}, {self.target!r})"


@dataclass(frozen=True, eq=False)
class CSV(Files, _InMemory):
    """Examples in CSV files, whose first line names the columns; read once into memory.

    ``paths``: a file, a pattern such as ``data/*.csv``, or a list of them.
    """

    paths: Paths
    inputs: Names = None
    target: Names = None
    delimiter: str = ","

    def _read(self) -> Batch:
        files = list(map(str, self.source_files))
        names = [self._names(file) for file in files]
        choice = Choice(names[0], self.inputs, self.target, files[0])
        for file, available in zip(files, names, strict=True):
            choice.check(available, file)
        tables = [(file, self._table(file, choice.names)) for file in files]
        schemas = [(file, table.schema) for file, table in tables]
        columns = Columns(schemas, self.inputs, self.target)
        for file, table in tables:
            self._check_large(file, table)
        return concatenated([columns.batch(table, file) for file, table in tables], repr(self))

    def _names(self, file: str) -> list[str]:
        """Return the names of all columns."""
        csv = imported("pyarrow.csv", "data")
        with reading(file), csv.open_csv(file, parse_options=self._parsing(csv)) as reader:
            return list(reader.schema.names)

    def _table(
        self, file: str, names: Sequence[str], types: dict[str, Any] | None = None
    ) -> pyarrow.Table:
        """Return columns; the others may hold anything."""
        csv = imported("pyarrow.csv", "data")
        options = csv.ConvertOptions(include_columns=list(dict.fromkeys(names)), column_types=types)
        with reading(file):
            return csv.read_csv(file, parse_options=self._parsing(csv), convert_options=options)

    def _parsing(self, csv: Any) -> Any:
        return csv.ParseOptions(delimiter=self.delimiter)

    def _check_large(self, file: str, table: pyarrow.Table) -> None:
        """Check numbers that were read as other floats: too large for int64, or for float64."""
        import pyarrow
        from pyarrow import compute

        for name in table.column_names:
            column = table.column(name)
            if not pyarrow.types.is_floating(column.type):
                continue
            if (compute.max(compute.abs(column)).as_py() or 0) < 2.0**63:
                continue
            texts = self._table(file, [name], {name: pyarrow.string()}).column(name)
            is_whole = compute.match_substring_regex(texts, r"^\s*[+-]?\d{19,}\s*$")
            is_beyond = compute.and_(
                compute.is_inf(column), compute.match_substring_regex(texts, r"\d")
            )
            found = texts.filter(compute.or_(is_whole, is_beyond))
            if len(found):
                raise DataError(
                    f"column {name!r} of {file} holds {found[0]}, which no int64 or float32 can "
                    "hold; expected whole numbers below 2**63, and others up to 3.4e38: number its "
                    "values from 0 on, or scale them"
                )


class _Group(NamedTuple):
    """A row group: its file, its number there, and its rows."""

    path: Path
    number: int
    first_row: int
    rows: int


@dataclass(frozen=True, eq=False)
class Parquet(Files):
    """Examples in Parquet files, whose row groups are read when they are used.

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
        indices = np.asarray(indices)
        groups = np.searchsorted(self._starts, indices, side="right") - 1
        batch = tuple(np.empty((len(indices), *a.shape[1:]), a.dtype) for a in self._like)
        for group in np.unique(groups).tolist():
            places = np.flatnonzero(groups == group)
            for rows, array in zip(batch, self._read(group), strict=True):
                rows[places] = array[indices[places] - self._starts[group]]
        return batch

    @cached_property
    def _schema(self) -> tuple[Columns, list[_Group]]:
        """The columns of all files, and the row groups."""
        parquet = imported("pyarrow.parquet", "data")
        schemas, groups = [], []
        for path in self.source_files:
            with reading(path):
                file = parquet.ParquetFile(path)
                counts = [file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)]
            starts = np.cumsum([0, *counts]).tolist()
            groups += [_Group(path, n, starts[n], rows) for n, rows in enumerate(counts)]
            schemas.append((str(path), file.schema_arrow))
        return Columns(schemas, self.inputs, self.target), groups

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        """The first row of each row group, and the number of rows."""
        return np.cumsum([0, *(group.rows for group in self._schema[1])])

    @cached_property
    def _like(self) -> Batch:
        """Arrays with no rows: the lists of the first row group have the lengths of all."""
        if not len(self):
            return self._schema[0].empty()
        first = int(np.searchsorted(self._starts, 0, side="right")) - 1
        return tuple(array[:0].copy() for array in self._read(first))

    def _read(self, number: int) -> Batch:
        """Return a row group; the last ones stay in memory."""
        from pyarrow import parquet

        arrays = self._kept.pop(number, None)
        if arrays is None:
            columns, groups = self._schema
            group = groups[number]
            where = f"{group.path}, row group {group.number}"
            with reading(where):
                file = parquet.ParquetFile(group.path)
                columns.choice.check(file.schema_arrow.names, str(group.path))
                table = file.read_row_group(group.number, columns.choice.names)
            if len(table) != group.rows:
                raise DataError(
                    f"{where} has {len(table)} rows, and had {group.rows} when the job began; data "
                    "must not change during training; start the task again"
                )
            arrays = columns.batch(
                table, str(group.path), range(group.first_row, group.first_row + group.rows)
            )
            self._make_room(arrays)
        self._kept[number] = arrays  # the last one
        return arrays

    def _make_room(self, arrays: Batch) -> None:
        used = sum(map(_nbytes, [arrays, *self._kept.copy().values()]))
        for group in list(self._kept):
            if used > self.memory_nbytes:
                used -= _nbytes(self._kept.pop(group, ()))


WHERE = "the data set"


@dataclass(frozen=True, eq=False)
class HuggingFace(Seeded):
    """Examples in a data set of Hugging Face's ``datasets`` that has a length.

    ``collator``: makes a batch of any kind from a list of dicts, as ``DataCollatorWithPadding`` of
    ``transformers`` does; they have the columns ``inputs``, all without them. Nothing is read
    ahead then, and its random numbers are seeded as those of :class:`zmqtrain.data.TorchDataset`.
    """

    dataset: Any
    inputs: Names = None
    target: Names = None
    collator: Collate | None = None

    def __post_init__(self) -> None:
        if not hasattr(self.dataset, "format"):
            names = list(self.dataset) if isinstance(self.dataset, Mapping) else []
            advice = f'give one of its parts: dataset["{names[0]}"]' if names else "give that"
            raise DataError(
                f"HuggingFace got a {type(self.dataset).__name__}; expected a datasets.Dataset, "
                f"which has a length: {advice}"
            )

    @property
    def may_be_read_ahead(self) -> bool:
        """Whether no generators are used that a model draws from, too."""
        return self.collator is None

    def take_seeded(self, indices: Array, seed: int, passes: Array) -> Batch:
        """Return these rows, with the columns and the transform that the data set has."""
        rows = np.asarray(indices).tolist()
        if self.collator is not None:
            found = self.dataset[rows]
            names = Choice(list(found), self.inputs, self.target, WHERE).names
            each = zip(*(found[name] for name in names), strict=True)
            examples = [dict(zip(names, row, strict=True)) for row in each]
            return collated(self.collator, examples, self, [seed, int(passes[0]), rows[0]])
        if self.dataset.format["type"] == "custom":
            found = self.dataset[rows]
            choice = Choice(list(found), self.inputs, self.target, WHERE)
            return choice.batch(lambda name: _converted(found, name), WHERE)
        columns, stored, decoded = self._stored
        table, found = stored[rows], decoded[rows] if columns.decoded else {}

        def column(name: str) -> NDArray[Any]:
            array = columns.column(name, table, WHERE, rows)
            if array is None:
                return _converted(found, name)
            return np.require(_wide(array), requirements="W")

        return columns.choice.batch(column, WHERE)

    @cached_property
    def _stored(self) -> tuple[Columns, Any, Any]:
        """The schema, all columns as an Arrow table, and the columns that ``datasets`` decodes."""
        schema, shown = self.dataset.features.arrow_schema, self.dataset.format["columns"]
        schema = imported("pyarrow", "data").schema([schema.field(name) for name in shown])
        columns = Columns([(WHERE, schema)], self.inputs, self.target, _is_decoded)
        names = list(dict.fromkeys(columns.choice.names))
        return (
            columns,
            self.dataset.with_format("arrow", columns=names),
            self.dataset.with_format("numpy", columns=columns.decoded),
        )

    def __repr__(self) -> str:
        return f"HuggingFace({len(self)} rows, {self.inputs!r}, {self.target!r})"


def _nbytes(arrays: Batch) -> int:
    return sum(int(array.nbytes) for array in arrays)


def _arrow(table: Any, inputs: Names, target: Names, where: str) -> pyarrow.Table:
    """Return a table as one of Arrow; of pandas only the chosen columns are converted."""
    arrow = imported("pyarrow", "data")
    if isinstance(table, arrow.Table):
        return table
    try:
        if hasattr(table, "iloc"):
            names = list(map(str, table.columns))
            chosen = set(Choice(names, inputs, target, where).names)
            meant = [place for place, name in enumerate(names) if name in chosen]
            return arrow.Table.from_pandas(table.iloc[:, meant], preserve_index=False)
        if type(table).__module__.startswith("polars."):
            table = table.select(Choice(table.columns, inputs, target, where).names)
        return arrow.table(table)
    except (TypeError, ValueError, ArithmeticError, LookupError, NotImplementedError) as error:
        raise DataError(
            f"{where}, a {type(table).__name__}, cannot be read ({error}); expected a DataFrame of "
            "pandas or polars, or an Arrow table, with numbers in the chosen columns"
        ) from error


def _converted(found: Any, name: str) -> NDArray[Any]:
    what = f"column {name!r} of {WHERE}"
    return numbers(plain(found[name], what), what)


def _is_decoded(kind: pyarrow.DataType) -> bool:
    """Return whether ``datasets`` decodes values of an Arrow type, such as images."""
    while hasattr(kind, "value_type") and not hasattr(kind, "storage_type"):
        kind = kind.value_type
    return hasattr(kind, "storage_type") or bool(imported("pyarrow", "data").types.is_struct(kind))


def _wide(array: NDArray[Any]) -> NDArray[Any]:
    """Return integers as int64, as ``datasets`` has them; others as they are."""
    if array.dtype.kind not in "iu":
        return array
    return exact(array, np.int64, f"a column of {WHERE}", "number its values from 0 on")
