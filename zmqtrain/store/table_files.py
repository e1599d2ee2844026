"""Rows of a table in one file for others, written block by block."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from zipfile import ZipFile

import numpy as np
from numpy.lib.format import write_array, write_array_header_1_0
from numpy.typing import NDArray

from zmqtrain.errors import CheckpointError, ConfigError, imported
from zmqtrain.models.tables import Ids
from zmqtrain.store.durable import sync_path, writing
from zmqtrain.store.saved_tables import SavedRows
from zmqtrain.store.tensor_file import Shape, TensorFile

RowDtype = Literal["float32", "float16"]


@dataclass(frozen=True)
class TableExport:
    """Chosen rows of a table. ``step``: that of their checkpoint. ``forgotten``: sorted ids of
    rows that the table had at an earlier step, and no longer has; None: all rows are here."""

    rows: SavedRows
    step: int
    dtype: RowDtype = "float32"
    forgotten: Ids | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows.ids), self.rows.record.dim

    @property
    def others(self) -> dict[str, NDArray[np.int64]]:
        """What a file has beside the rows."""
        found = {"ids": self.rows.ids, "step": np.array(self.step)}
        return found if self.forgotten is None else found | {"forgotten": self.forgotten}

    def blocks(self) -> Iterator[NDArray[Any]]:
        """Yield the rows in their dtype.

        Raises:
            CheckpointError: a file cannot be read, or an element is too large for the dtype.
        """
        for ids, rows in self.rows.blocks():
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


def check_ending(path: Path) -> None:
    """Check that a table can be written to a path.

    Raises:
        ConfigError: it has another ending, or what writes it is not installed.
    """
    if path.suffix not in _WRITERS:
        raise ConfigError(
            f"a table in {str(path)!r}; expected a path that ends with {', '.join(_WRITERS)}"
        )
    if path.suffix == ".parquet":
        imported("pyarrow.parquet", "data")


def write_table(path: Path, export: TableExport) -> None:
    """Write rows into one file, in place of what is there; directories are made.

    ``.npz`` and ``.safetensors`` have int64 ``ids``, shape (n,), ``rows``, shape (n, dim), and
    ``step``; an export of changes also has ``forgotten``. ``.parquet`` has columns ``id`` and
    ``row``, which is null for a forgotten id, and the step in the metadata of its schema.

    Raises:
        ConfigError: the path has another ending, or what writes it is not installed.
        CheckpointError: the rows cannot be read, or the file cannot be written.
    """
    check_ending(path)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with _replaced(path) as temporary:
            _WRITERS[path.suffix](temporary, export)


@contextmanager
def _replaced(path: Path) -> Iterator[Path]:
    """Yield a path beside this one, from which the file comes here when it is complete."""
    temporary = path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")
    try:
        yield temporary
        sync_path(temporary)
        os.replace(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):
            temporary.unlink()
        raise


def _write_npz(path: Path, export: TableExport) -> None:
    with ZipFile(path, "w") as file:
        for name, array in export.others.items():
            with file.open(f"{name}.npy", "w", force_zip64=True) as entry:
                write_array(entry, array, allow_pickle=False)
        with file.open("rows.npy", "w", force_zip64=True) as entry:
            descr = np.dtype(export.dtype).str
            header = {"shape": export.shape, "fortran_order": False, "descr": descr}
            write_array_header_1_0(entry, header)
            for block in export.blocks():
                entry.write(block.data)


def _write_safetensors(path: Path, export: TableExport) -> None:
    others = export.others
    shapes = {name: Shape("int64", array.shape) for name, array in others.items()}
    file = TensorFile(path, shapes | {"rows": Shape(export.dtype, export.shape)})
    try:
        for name, array in others.items():
            file.write(name, array)
        begin = 0
        for block in export.blocks():
            file.write("rows", block, begin)
            begin += len(block)
    finally:
        file.close()


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


_WRITERS: Mapping[str, Callable[[Path, TableExport], None]] = {
    ".npz": _write_npz,
    ".safetensors": _write_safetensors,
    ".parquet": _write_parquet,
}
