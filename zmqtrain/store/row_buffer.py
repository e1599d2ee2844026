"""The rows of a worker's push, in memory that it and its ps share, beside its gradient.

A buffer is a file that grows by need. It begins with int64 numbers: how many parts, then for each
its table and how many rows, then the ids of all parts; behind them are their rows, float32.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from zmqtrain.errors import SegmentError
from zmqtrain.models.tables import RowsOf
from zmqtrain.store.arena import PAGE
from zmqtrain.store.segment import reserve
from zmqtrain.store.table_layout import TableLayout


class RowBuffer:
    """The rows of one push, as the worker writes and the ps reads them."""

    def __init__(self, descriptor: int, path: Path | None, tables: Sequence[TableLayout]) -> None:
        """``path``: None if the memory is this process's own."""
        self._descriptor, self._path = descriptor, path
        self._dims = [table.variable.dim for table in tables]
        weakref.finalize(self, os.close, descriptor)
        self._memory: mmap.mmap | None = None

    def write(self, parts: Sequence[RowsOf]) -> None:
        """Set the rows of the push, sorted by table; () if it has none.

        Raises:
            SegmentError: the file system has no room.
        """
        nbytes = nbytes_of(parts)
        if self._memory is None or len(self._memory) < nbytes:
            held = -(-nbytes * 5 // 4 // PAGE) * PAGE
            if self._path is not None:
                reserve(self._descriptor, 0, held, self._path)
            elif os.fstat(self._descriptor).st_size < held:
                os.ftruncate(self._descriptor, held)
            self._memory = mmap.mmap(self._descriptor, held)
        put(self._memory, 0, parts)

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
    head = [len(parts), *chain.from_iterable((part.table, len(part.ids)) for part in parts)]
    numbers = np.frombuffer(memory, np.int64, (_rows_at(parts)) // 8, at)
    numbers[0] = 0
    numbers[1 : len(head)] = head[1:]
    number, place = len(head), at + _rows_at(parts)
    for part in parts:
        numbers[number : number + len(part.ids)] = part.ids
        values = np.frombuffer(memory, np.float32, part.rows.size, place)
        values.reshape(part.rows.shape)[...] = part.rows
        number, place = number + len(part.ids), place + values.nbytes
    numbers[0] = len(parts)


def get(memory: mmap.mmap, at: int, dims: Sequence[int]) -> list[RowsOf]:
    """Return the rows that were :func:`put`, as views.

    Raises:
        ValueError, IndexError: the memory does not hold that.
    """
    (count,) = np.frombuffer(memory, np.int64, 1, at).tolist()
    if not 0 <= count <= len(dims):
        raise ValueError(f"{count} parts")
    heads = np.frombuffer(memory, np.int64, 2 * count, at + 8).reshape(count, 2)
    if ((heads < 0) | (heads[:, :1] >= len(dims))).any():
        raise ValueError("parts of other tables")
    first = at + 8 * (1 + 2 * count)
    every = np.frombuffer(memory, np.int64, int(heads[:, 1].sum()), first)
    rises = np.append(every[1:] > every[:-1], True)
    ends = heads[:, 1].cumsum()
    rises[ends[ends > 0] - 1] = True  # from one table to the next they need not
    if not rises.all():
        raise ValueError("ids of a table that do not rise")
    place, begin = first + every.nbytes, 0
    place += (at - place) % 64
    values = np.frombuffer(memory, np.float32, offset=place)
    parts, number = [], 0
    for table, rows in heads.tolist():
        end, dim = begin + rows, dims[table]
        flat = values[number : number + rows * dim]
        parts.append(RowsOf(table, every[begin:end], flat.reshape(rows, dim)))
        begin, number = end, number + rows * dim
    return parts


def _rows_at(parts: Sequence[RowsOf]) -> int:
    numbers = 1 + sum(2 + len(part.ids) for part in parts)
    return -(-8 * numbers // 64) * 64
