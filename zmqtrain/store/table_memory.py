"""The rows of one shard's tables, in files that other processes of the host map, or private.

The files are in a directory beside the segment (see ``tables_directory`` in segment_files.py), and
live as long as that.
"""

from __future__ import annotations

import os
import secrets
import shutil
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zmqtrain.compute.arrays import Flat
from zmqtrain.errors import SegmentError
from zmqtrain.files import open_file
from zmqtrain.models.tables import Found, Ids, Rows
from zmqtrain.optim.kernels.random import initial_rows
from zmqtrain.store.arena import Arena, create_arena, private_file, space_of
from zmqtrain.store.row_buffer import RowBuffer
from zmqtrain.store.row_store import RowStore
from zmqtrain.store.segment import REMEDY
from zmqtrain.store.table_layout import (
    FIXED,
    LAYOUT_VERSION,
    MAGIC,
    SWEEPS,
    MemoryLayout,
    TableLayout,
)
from zmqtrain.transport import own_directory

_FILE = "rows"
_INSIDE = "process:"  # and a token: the name of private memory

_private: weakref.WeakValueDictionary[str, TableMemory] = weakref.WeakValueDictionary()


class TableMemory:
    """The memory of the tables of one shard. ``name`` is what :func:`reach` takes."""

    def __init__(self, layout: MemoryLayout, arena: Arena, name: str) -> None:
        """Use :meth:`private`, :meth:`create` or :meth:`adopt`, or :func:`reach`."""
        self.layout, self.arena, self.name = layout, arena, name
        self.words = memoryview(arena.memory)[layout.words].cast("q")
        self.stores = [RowStore(arena, store) for store in layout.stores]
        self.candidates = {n: RowStore(arena, one) for n, one in layout.candidates.items()}
        self._found: dict[int, tuple[Ids, Found]] = {}  # by table, of the last read
        self._buffers: dict[int, RowBuffer] = {}

    @classmethod
    def private(cls, tables: Sequence[TableLayout]) -> TableMemory:
        """Make memory that only this process can reach."""
        layout = MemoryLayout(tables, space_of(None))
        arena = Arena(private_file(layout.nbytes), None)
        memory = cls(layout, arena, _INSIDE + secrets.token_hex(8))
        _private[memory.name] = memory
        return memory._new()

    @classmethod
    def create(cls, tables: Sequence[TableLayout], directory: Path) -> TableMemory:
        """Make files in a directory, which replace those of a dead process.

        Raises:
            SegmentError: its file system has no room or refuses, or it is not ours alone.
        """
        directory = directory.absolute()
        own_directory.make(directory.parent, REMEDY, SegmentError)
        shutil.rmtree(directory, ignore_errors=True)
        own_directory.make(directory, REMEDY, SegmentError)
        layout = MemoryLayout(tables, space_of(directory))
        arena = create_arena(directory / _FILE, layout.nbytes)
        arena.reserve(0, layout.scratch_at)
        return cls(layout, arena, str(directory))._new()

    def _new(self) -> TableMemory:
        for store in (*self.stores, *self.candidates.values()):
            self.arena.reserve(store.layout.words_at, store.layout.free_at - store.layout.words_at)
            store.clear()
        fixed = MAGIC, LAYOUT_VERSION, self.layout.space, self.layout.digest
        FIXED.pack_into(self.arena.memory, 0, *fixed)
        return self

    @classmethod
    def adopt(cls, tables: Sequence[TableLayout], directory: Path) -> TableMemory | None:
        """Take over the memory of a dead process; None if there is none of these tables.

        The shard repairs it, unless members of a board go on in it.

        Raises:
            SegmentError: it may not be opened, or is not ours alone.
        """
        directory = directory.absolute()
        if not (directory / _FILE).exists():
            return None
        own_directory.check(directory, REMEDY, SegmentError)
        try:
            layout, arena = _open(directory / _FILE, tables, os.O_RDWR)
        except SegmentError:
            return None
        return cls(layout, arena, str(directory))

    def buffer(self, number: int) -> RowBuffer:
        """Return the buffer of rows that belongs to gradient ``number``.

        Raises:
            SegmentError: the file system refuses.
        """
        found = self._buffers.get(number)
        if found is None:
            given = self.layout.tables, self._found
            if self.arena.path is None:
                found = RowBuffer(private_file(0), None, *given)
            else:
                path = self.arena.path.with_name(f"buffer-{number}")
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
                try:
                    found = RowBuffer(open_file(path, flags, 0o600), path, *given)
                except OSError as error:
                    raise SegmentError(f"{path} cannot be opened: {error.strerror}") from error
            self._buffers[number] = found
        return found

    def read(self, table: int, ids: Ids) -> Rows:
        """Return the current rows with these ids, shape (n, dim): initial where not trained."""
        rows, found, missing = self.stores[table].read(ids)
        self._found[table] = ids, found
        if missing:
            self.begin_rows(table, ids, rows, np.flatnonzero(found.places < 0))
        return rows

    def begin_rows(self, table: int, ids: Ids, rows: Rows, where: NDArray[np.int64]) -> None:
        """Write the rows of these ids as they are before any training, in some places."""
        of = self.layout.tables[table].variable
        rows[where] = initial_rows(of.initial, of.key, ids[where], of.dim)

    def close(self) -> None:
        """Leave the files for the next life of this ps; no snapshot is read on."""
        for store in (*self.stores, *self.candidates.values()):
            store.thaw()
        self._buffers.clear()

    def remove(self) -> None:
        """Remove the files. A process that has them mapped keeps the memory."""
        self.close()
        if self.arena.path is not None:
            shutil.rmtree(self.arena.path.parent, ignore_errors=True)


class KeptRows:
    """The rows of all tables as they are when this is made; the shard is idle then.

    Updates copy what they are about to change (see row_snapshot.py), as long as somebody has this.
    """

    def __init__(self, memory: TableMemory) -> None:
        self._memory = memory
        self._snapshots = [store.freeze() for store in memory.stores]
        self._sweeps = [store.words[SWEEPS] for store in memory.stores]

    def read(self, table: int, ids: Ids) -> Rows:
        """Return the rows with these ids as they were, shape (n, dim).

        Raises:
            CheckpointError: the shard has begun anew.
        """
        store, snapshot = self._memory.stores[table], self._snapshots[table]
        places, _ = store.find(ids)
        forgets = store.words[SWEEPS] != self._sweeps[table]
        if snapshot.is_for_others:  # what they forget may be seen earlier than SWEEPS
            variable = self._memory.layout.tables[table].variable
            forgets = variable.forget_after is not None or variable.max_rows is not None
        rows, is_there = snapshot.read(ids, places, forgets=forgets)
        self._memory.begin_rows(table, ids, rows, np.flatnonzero(~is_there))
        return rows


class Kept(NamedTuple):
    """A version of a shard. ``parameters``: those that it owns, or their moving averages."""

    version: int
    parameters: Flat
    rows: KeptRows | None  # None: it has no tables


def reach(name: str, tables: Sequence[TableLayout], *, writable: bool = False) -> TableMemory:
    """Return the memory of this name, to read rows and to write to buffers.

    ``writable``: also to change rows, as a member of a board.

    Raises:
        SegmentError: it is not on this host, may not be opened, or is of other tables.
    """
    if not name.startswith(_INSIDE):
        path = Path(name) / _FILE
        return TableMemory(*_open(path, tables, os.O_RDWR if writable else os.O_RDONLY), name)
    found = _private.get(name)
    if found is None:
        raise SegmentError("the ps has its tables in memory of its own process")
    if found.layout.digest != MemoryLayout(tables, 0).digest:
        raise _other("that memory")
    return found


def _open(path: Path, tables: Sequence[TableLayout], flags: int) -> tuple[MemoryLayout, Arena]:
    try:
        descriptor = open_file(path, flags | os.O_NOFOLLOW)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SegmentError(f"{path} cannot be opened: {reason}") from error
    head = os.pread(descriptor, FIXED.size, 0).ljust(FIXED.size, b"\0")
    magic, version, space, digest = FIXED.unpack(head)
    layout = MemoryLayout(tables, space)
    expected = MAGIC, LAYOUT_VERSION, layout.digest, layout.nbytes
    if (magic, version, digest, os.fstat(descriptor).st_size) != expected:
        os.close(descriptor)
        raise _other(str(path))
    return layout, Arena(descriptor, path, writable=flags != os.O_RDONLY)


def _other(name: str) -> SegmentError:
    return SegmentError(f"{name} is of other tables, or of another version: it is another shard's")
