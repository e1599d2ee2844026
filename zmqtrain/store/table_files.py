"""The rows of a table in one file, for others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from zmqtrain.errors import CheckpointError
from zmqtrain.hints import imported
from zmqtrain.models.tables import Ids
from zmqtrain.store.array_files import ArrayStream, check_ending, write_arrays, write_file
from zmqtrain.store.saved_rows import SavedRows

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
