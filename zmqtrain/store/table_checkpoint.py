"""Tables in a checkpoint: their part of a shard's file, which any shard can read.

A shard's file has, for each table, tensors named ``/PART/TABLE``, which no dense variable's can be:
``ids`` (int64, sorted), ``rows`` (float32, shape (n, dim)), ``stamps`` (the update that trained
each row last), and ``slot.NAME`` for each slot. A table that admits rows by their counts has the
ids that are not admitted yet, ``candidates``, and their ``counts``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zmqtrain.errors import CheckpointError
from zmqtrain.models.tables import (
    Given,
    Ids,
    Normal,
    RowPlace,
    Rows,
    TableVariable,
    Uniform,
    shards_of,
)
from zmqtrain.store.manifest import Manifest, TableRecord
from zmqtrain.store.row_store import RowStore
from zmqtrain.store.saved_rows import SavedRows, initial_name, record_of
from zmqtrain.store.table_layout import TableLayout
from zmqtrain.store.tensor_file import Shape


class HeldRows(NamedTuple):
    """Rows as a store takes them over: ``parts`` are (n, width) for each width."""

    ids: Ids
    stamps: NDArray[np.int64]
    parts: list[NDArray[np.float32]]


class FrozenTable:
    """The rows of a table on one shard at one moment, by names in its file."""

    def __init__(
        self,
        layout: TableLayout,
        store: RowStore,
        candidates: RowStore | None,
        own: Callable[[Ids], NDArray[np.bool_]] | None = None,
    ) -> None:
        """``own``: selects the rows that the shard writes; None: all that it holds."""

        def named(parts: Iterable[str]) -> list[str]:
            return [f"/{part}/{layout.variable.name}" for part in parts]

        rows = store.freeze(own)
        self._snapshots = [(rows, named(["ids", "stamps", *_parts(layout)]))]
        if candidates is not None:
            self._snapshots.append((candidates.freeze(own), named(["candidates", "counts"])))
        widths = dict(zip(named(_parts(layout)), layout.widths, strict=True))
        self.shapes = {
            name: Shape("float32", (snapshot.rows, widths[name]))
            if name in widths
            else Shape("int64", (snapshot.rows,))
            for snapshot, names in self._snapshots
            for name in names
        }

    def write(self, write: Callable[[str, NDArray[Any], int], None]) -> None:
        """Write all parts of all tensors, while the shard changes, by calls with name, rows and
        number of the first row.

        Raises:
            CheckpointError: the shard has lost these rows meanwhile.
        """
        for snapshot, names in self._snapshots:
            begin = 0
            for block in snapshot.blocks():
                for name, array in zip(names, block, strict=True):
                    write(name, array, begin)
                begin += len(block[0])

    def close(self) -> None:
        """Release the snapshots."""
        for snapshot, _ in self._snapshots:
            snapshot.close()


def table_records(layouts: tuple[TableLayout, ...]) -> dict[str, TableRecord]:
    """Return ``Manifest.tables``."""
    return {layout.variable.name: _record(layout) for layout in layouts}


def _record(layout: TableLayout) -> TableRecord:
    variable, names = layout.variable, (slot.name for slot in layout.slots)
    initial: dict[str, Any] = {}
    match variable.initial:
        case Uniform(limit):
            initial = {"initial": "uniform", "scale": limit}
        case Normal(std):
            initial = {"initial": "normal", "scale": std}
        case Given():
            initial = {"initial": "given"}
    return TableRecord(
        dim=variable.dim,
        rows=variable.rows,
        slots=dict(zip(names, layout.widths[1:], strict=True)),
        key=variable.key,
        **initial,
    )


def given_rows(tables: Iterable[TableVariable]) -> dict[str, Rows]:
    """Return the arrays that gave rows their first values, by names in a checkpoint's file."""
    given = ((table.name, table.initial) for table in tables)
    return {initial_name(name): one.array for name, one in given if isinstance(one, Given)}


def read_table(
    path: Path, manifest: Manifest, layout: TableLayout, place: RowPlace
) -> tuple[HeldRows, HeldRows | None]:
    """Read the rows that a shard holds, and its candidates, whatever shards wrote them.

    Raises:
        CheckpointError: the checkpoint has no such table, or a file is damaged.
    """
    _check(path, manifest, layout)
    name = layout.variable.name

    def own(ids: Ids) -> NDArray[np.bool_]:
        return place.holds(shards_of(ids, place.shards))

    parts = dict(zip(_parts(layout), layout.widths, strict=True))
    rows = SavedRows(path, manifest, name, parts, own=own)
    held = HeldRows(rows.ids, rows.stamps, rows.read())
    if not layout.variable.admit_after:
        return held, None
    counted = SavedRows(path, manifest, name, {}, keys=("candidates", "counts"), own=own)
    return held, HeldRows(counted.ids, counted.stamps, [])


def _parts(layout: TableLayout) -> list[str]:
    return ["rows", *(f"slot.{slot.name}" for slot in layout.slots)]


def _check(path: Path, manifest: Manifest, layout: TableLayout) -> None:
    """Check that a checkpoint has a table as the job has it."""
    variable = layout.variable
    record = record_of(path, manifest, variable.name)
    if record.dim != variable.dim:
        raise CheckpointError(
            f"{path}: the table {variable.name!r} has rows of {record.dim} in it and of "
            f"{variable.dim} in the job; go back to the model that wrote it, or train in a new "
            "logdir"
        )
    for slot, width in zip(layout.slots, layout.widths[1:], strict=True):
        if record.slots.get(slot.name) != width:
            raise CheckpointError(
                f"{path}: the table {variable.name!r} has no optimizer slot {slot.name!r} with "
                f"{width} elements a row; its slots: {_described(record.slots)}; it was written "
                "with another optimizer; go back to that one, or begin anew in another logdir"
            )


def _described(slots: Mapping[str, int]) -> str:
    return ", ".join(f"{name} with {width}" for name, width in slots.items()) or "none"
