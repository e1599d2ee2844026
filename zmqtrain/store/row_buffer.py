"""The rows of a worker's push, in memory that it and its ps share, and the sum of those of a step.

A buffer is a file that grows by need. It begins with int64 numbers: how many parts; then for each
its table, how many rows, and when these were found (see Found), -1 for never; then the ids of all
parts, and the places where they were found. Behind them are their rows, float32. The sum of a step
is the list of its contributions, one behind the other.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from zmqtrain.errors import SegmentError
from zmqtrain.models.tables import Found, Ids, RowsOf
from zmqtrain.store.arena import PAGE, Arena
from zmqtrain.store.changes import float_of, word_of
from zmqtrain.store.segment import reserve
from zmqtrain.store.table_layout import SUM_BEFORE, SUM_END, MemoryLayout, TableLayout

_HEAD = 3  # numbers of a part, before those of its rows


class RowBuffer:
    """The rows of one push, as the worker writes and the ps reads them."""

    def __init__(
        self,
        descriptor: int,
        path: Path | None,
        tables: Sequence[TableLayout],
        found: Mapping[int, tuple[Ids, Found]],
    ) -> None:
        """``path``: None if the memory is this process's own. ``found``: by table, for which
        array of ids this process has found rows last, and where."""
        self._descriptor, self._path, self._found = descriptor, path, found
        self._dims = [table.variable.dim for table in tables]
        weakref.finalize(self, os.close, descriptor)
        self._memory: mmap.mmap | None = None

    def write(self, parts: Sequence[RowsOf]) -> None:
        """Set the rows of the push, sorted by table; () if it has none.

        Raises:
            SegmentError: the file system has no room.
        """
        parts = [RowsOf(one.table, one.ids, one.rows, self._found_of(one)) for one in parts]
        nbytes = nbytes_of(parts)
        if self._memory is None or len(self._memory) < nbytes:
            held = -(-nbytes * 5 // 4 // PAGE) * PAGE
            if self._path is not None:
                reserve(self._descriptor, 0, held, self._path)
            elif os.fstat(self._descriptor).st_size < held:
                os.ftruncate(self._descriptor, held)
            self._memory = mmap.mmap(self._descriptor, held)
        put(self._memory, 0, parts)

    def _found_of(self, part: RowsOf) -> Found | None:
        ids, found = self._found.get(part.table, (None, None))
        return found if ids is part.ids else None

    def read(self) -> list[RowsOf]:
        """Return the rows of the push by table: views, which the next push overwrites.

        Raises:
            SegmentError: the buffer was not written by a worker of this job.
        """
        held = os.fstat(self._descriptor).st_size
        if not held:
            return []
        if self._memory is None or len(self._memory) < held:
            self._memory = mmap.mmap(self._descriptor, held)
        try:
            return get(self._memory, 0, self._dims)
        except (ValueError, IndexError) as error:
            raise SegmentError(
                f"{self._path or 'a buffer of rows'} does not hold rows of these tables ({error}); "
                "end the processes of other jobs that write to it"
            ) from error


def nbytes_of(parts: Sequence[RowsOf]) -> int:
    """Return how many bytes :func:`put` writes."""
    return _rows_at(parts) + 4 * sum(part.rows.size for part in parts)


def put(memory: mmap.mmap, at: int, parts: Sequence[RowsOf]) -> None:
    """Write parts into memory that begins at a multiple of 64; their number comes last."""
    total, first = sum(len(part.ids) for part in parts), 1 + _HEAD * len(parts)
    numbers = np.frombuffer(memory, np.int64, first + 2 * total, at)
    numbers[0] = 0
    if not parts:
        return
    found = [part.found or Found(-1, np.full(len(part.ids), -1)) for part in parts]
    pairs = zip(parts, found, strict=True)
    numbers[1:first] = [n for part, one in pairs for n in (part.table, len(part.ids), one.sweeps)]
    np.concatenate([part.ids for part in parts], out=numbers[first : first + total])
    np.concatenate([one.places for one in found], out=numbers[first + total :])
    rows = [part.rows.reshape(-1) for part in parts]
    values = np.frombuffer(memory, np.float32, sum(map(len, rows)), at + _rows_at(parts))
    np.concatenate(rows, out=values)
    numbers[0] = len(parts)


def get(memory: mmap.mmap, at: int, dims: Sequence[int]) -> list[RowsOf]:
    """Return the rows that were :func:`put`, as views.

    Raises:
        ValueError, IndexError: the memory does not hold that.
    """
    (count,) = np.frombuffer(memory, np.int64, 1, at).tolist()
    if not 0 <= count <= len(dims):
        raise ValueError(f"{count} parts")
    heads = np.frombuffer(memory, np.int64, _HEAD * count, at + 8).reshape(count, _HEAD)
    if ((heads[:, :2] < 0) | (heads[:, :1] >= len(dims))).any():
        raise ValueError("parts of other tables")
    first = at + 8 * (1 + _HEAD * count)
    total = int(heads[:, 1].sum())
    every, places = np.frombuffer(memory, np.int64, 2 * total, first).reshape(2, total)
    rises = np.append(every[1:] > every[:-1], True)
    ends = heads[:, 1].cumsum()
    rises[ends[ends > 0] - 1] = True  # from one table to the next they need not
    if not rises.all():
        raise ValueError("ids of a table that do not rise")
    place, begin = first + 2 * every.nbytes, 0
    place += (at - place) % 64
    values = np.frombuffer(memory, np.float32, offset=place)
    parts, number = [], 0
    for table, rows, sweeps in heads.tolist():
        end, dim = begin + rows, dims[table]
        flat = values[number : number + rows * dim]
        own, shape = slice(begin, end), (rows, dim)
        parts.append(RowsOf(table, every[own], flat.reshape(shape), Found(sweeps, places[own])))
        begin, number = end, number + rows * dim
    return parts


def _rows_at(parts: Sequence[RowsOf]) -> int:
    numbers = 1 + sum(_HEAD + 2 * len(part.ids) for part in parts)
    return -(-8 * numbers // 64) * 64


Contributed: TypeAlias = tuple[list[RowsOf], float]
"""The rows of a gradient, by table, and its weight."""

_SUM_HEAD = 64  # bytes before a contribution: bytes up to the next one, and its weight


class RowSum:
    """The sum of all tables of a shard, in memory that outlives the process."""

    def __init__(self, arena: Arena, words: memoryview, layout: MemoryLayout) -> None:
        """``words``: those of all tables together."""
        self._arena, self._words, self._at = arena, words, layout.sum_at
        self._dims = [table.variable.dim for table in layout.tables]

    def begin(self, given: Sequence[Contributed], *, goes_on: bool) -> None:
        """Make room for contributions, behind those that are there if it ``goes_on``.

        Raises:
            SegmentError: there is no room.
        """
        before = self._words[SUM_END] if goes_on else 0
        self._arena.reserve(
            self._at + before, sum(_contribution_nbytes(parts) for parts, _ in given)
        )
        self._words[SUM_BEFORE] = before

    def add(self, given: Sequence[Contributed]) -> None:
        """Add the contributions for which there is room, or finish that."""
        at = self._words[SUM_BEFORE]
        for parts, weight in given:
            put(self._arena.memory, self._at + at + _SUM_HEAD, parts)
            end = at + _contribution_nbytes(parts)
            self._arena.ints(self._at + at, 2)[:] = end, word_of(weight)
            at = end
        self._words[SUM_END] = at

    def read(self) -> list[Contributed]:
        """Return all contributions: views."""
        found: list[Contributed] = []
        at = 0
        while at < self._words[SUM_END]:
            end, weight = self._arena.ints(self._at + at, 2).tolist()
            parts = get(self._arena.memory, self._at + at + _SUM_HEAD, self._dims)
            found.append((parts, float_of(weight)))
            at = end
        return found

    def clear(self) -> None:
        self._words[SUM_END] = 0


def _contribution_nbytes(parts: Sequence[RowsOf]) -> int:
    return _SUM_HEAD + -(-nbytes_of(parts) // 64) * 64
