"""Arrays by name, and rows of a table, in one file, written block by block, for others to read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from zipfile import ZipFile

import numpy as np
from numpy.lib.format import write_array_header_1_0
from numpy.typing import NDArray

from zmqtrain.errors import CheckpointError, ConfigError
from zmqtrain.files import replaced
from zmqtrain.hints import imported
from zmqtrain.models.tables import Ids
from zmqtrain.store.durable import sync_path, writing
from zmqtrain.store.saved_rows import SavedRows
from zmqtrain.store.tensor_file import Shape, TensorFile


@dataclass(frozen=True, slots=True)
class ArrayStream:
    """An array whose rows come in blocks, one after the other."""

    dtype: str  # NumPy's name
    shape: tuple[int, ...]
    blocks: Callable[[], Iterator[NDArray[Any]]]


def check_ending(path: Path, what: str = "weights", *others: str) -> None:
    """Check that a path has the ending of a file of arrays, or one of ``others``.

    Raises:
        ConfigError: it has not.
    """
    known = [".safetensors", ".npz", *others]
    if path.suffix not in known:
        text = ", ".join(known[:-1])
        raise ConfigError(
            f"{what} in {str(path)!r}; expected a path that ends with {text} or {known[-1]}"
        )


def write_arrays(path: Path, arrays: Mapping[str, NDArray[Any] | ArrayStream]) -> None:
    """Write arrays into one file, which replaces an older one; directories are made.

    Raises:
        CheckpointError: it cannot be written.
    """
    streams = {name: _stream(array) for name, array in arrays.items()}
    write = _write_npz if path.suffix == ".npz" else _write_safetensors
    write_file(path, lambda temporary: write(temporary, streams))


def write_file(path: Path, write: Callable[[Path], None]) -> None:
    """Let a function write a file that comes in place of ``path`` when it is complete.

    Raises:
        CheckpointError: it cannot be written.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(path) as temporary:
            write(temporary)
            sync_path(temporary)


def _stream(array: NDArray[Any] | ArrayStream) -> ArrayStream:
    if isinstance(array, ArrayStream):
        return array
    return ArrayStream(array.dtype.name, array.shape, lambda: iter([array]))


def _write_npz(path: Path, streams: Mapping[str, ArrayStream]) -> None:
    """Write as numpy.savez does, which cannot write an array called "file"."""
    with ZipFile(path, "w") as file:
        for name, each in streams.items():
            with file.open(f"{name}.npy", "w", force_zip64=True) as entry:
                descr = np.dtype(each.dtype).str
                header = {"shape": each.shape, "fortran_order": False, "descr": descr}
                write_array_header_1_0(entry, header)
                for block in each.blocks():
                    entry.write(np.ascontiguousarray(block).data)


def _write_safetensors(path: Path, streams: Mapping[str, ArrayStream]) -> None:
    file = TensorFile(path, {name: Shape(each.dtype, each.shape) for name, each in streams.items()})
    try:
        for name, each in streams.items():
            begin = 0
            for block in each.blocks():
                file.write(name, block, begin)
                begin += len(block) if block.ndim else 1
    finally:
        file.close()


RowDtype = Literal["float32", "float16"]


@dataclass(frozen=True)
class TableExport:
    """Chosen rows of a table. ``step``: that of their checkpoint. ``forgotten``: sorted ids of
    rows that the table had at an earlier step, and no longer has; None: all rows are here."""

    rows: SavedRows
    dim: int
    step: int
    dtype: RowDtype = "float32"
    forgotten: Ids | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows.ids), self.dim

    def blocks(self) -> Iterator[NDArray[Any]]:
        """Yield the rows in their dtype.

        Raises:
            CheckpointError: a file cannot be read, or an element is too large for the dtype.
        """
        for ids, (rows,) in self.rows.blocks():
            with np.errstate(over="ignore"):
                found = rows.astype(self.dtype, copy=False)
            too_large = np.isinf(found) & np.isfinite(rows)
            if too_large.any():
                place, column = np.argwhere(too_large)[0]
                raise CheckpointError(
                    f"the row with id {ids[place]} has {rows[place, column]:g}; expected at most "
                    f"{np.finfo(self.dtype).max:g} for {self.dtype}: export float32"
                )
            yield found


def check_table_file(path: Path) -> None:
    """Check that a table can be written to a path.

    Raises:
        ConfigError: it has another ending, or its library is not installed.
    """
    check_ending(path, "a table", ".parquet")
    if path.suffix == ".parquet":
        imported("pyarrow.parquet", "data")


def write_table(path: Path, export: TableExport) -> None:
    """Write rows into one file, which replaces an older one; directories are made.

    ``.npz`` and ``.safetensors`` have int64 ``ids``, shape (n,), ``rows``, shape (n, dim), and
    ``step``; an export of changes also has ``forgotten``. ``.parquet`` has columns ``id`` and
    ``row``, which is null for a forgotten id, and the step in the metadata of its schema.

    Raises:
        CheckpointError: the rows cannot be read, or the file cannot be written.
    """
    if path.suffix == ".parquet":
        write_file(path, lambda temporary: _write_parquet(temporary, export))
        return
    arrays = {"ids": export.rows.ids, "step": np.array(export.step)}
    if export.forgotten is not None:
        arrays["forgotten"] = export.forgotten
    write_arrays(path, {**arrays, "rows": ArrayStream(export.dtype, export.shape, export.blocks)})


def _write_parquet(path: Path, export: TableExport) -> None:
    arrow, parquet = imported("pyarrow", "data"), imported("pyarrow.parquet", "data")
    element = arrow.from_numpy_dtype(np.dtype(export.dtype))
    kind = arrow.list_(element, export.shape[1])
    fields = [arrow.field("id", arrow.int64(), nullable=False), arrow.field("row", kind)]
    schema = arrow.schema(fields, metadata={"step": str(export.step)})
    with parquet.ParquetWriter(path, schema) as file:

        def write(ids: Ids, rows: Any) -> None:
            file.write_table(arrow.Table.from_arrays([arrow.array(ids), rows], schema=schema))

        begin = 0
        for block in export.blocks():
            ids = export.rows.ids[begin : begin + len(block)]
            flat = arrow.array(block.reshape(-1), element)
            write(ids, arrow.FixedSizeListArray.from_arrays(flat, type=kind))
            begin += len(block)
        if export.forgotten is not None:
            write(export.forgotten, arrow.nulls(len(export.forgotten), kind))
