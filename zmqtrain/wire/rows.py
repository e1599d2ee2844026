"""Rows of tables on the wire: their ids, and the rows themselves.

A message names tables and how many rows of each it has. Its ids are one tensor of bytes, table by
table. Sorted ids differ little: of each table the first id is written in 8 bytes, then how many
bytes a difference has, then the differences to the id before. Behind them are the rows as float32,
or as the job's compression encodes them: those of all tables with one form of it together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from operator import mul
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from zmqtrain.compute.arrays import Flat
from zmqtrain.errors import ProtocolError
from zmqtrain.models.tables import Ids, Rows, RowsOf
from zmqtrain.wire.buffers import FRAME_NBYTES, Tensor
from zmqtrain.wire.chunks import Part, take_in
from zmqtrain.wire.compression import Compression
from zmqtrain.wire.messages import MAX_PARTS, RowChunk

_HEAD = 9  # bytes: the first id, and the width of a difference

MAX_LENGTHS = 30  # different lengths of rows in a message: each may be another form, of two tensors

Run: TypeAlias = tuple[int, slice]
"""The place of a table in a list, and some of its rows."""


def encoded(each: Sequence[Ids]) -> Tensor:
    """Return the sorted unique ids of several tables as they travel."""
    parts: list[NDArray[np.uint8]] = []
    for ids in each:
        if not len(ids):
            continue
        steps = np.diff(ids.view(np.uint64))
        width = max(1, -(-int(steps.max(initial=0)).bit_length() // 8))
        parts.append(ids[:1].astype("<i8").view(np.uint8))
        parts.append(np.array([width], np.uint8))
        parts.append(steps.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :width].ravel())
    return Tensor.of(np.concatenate(parts) if parts else np.empty(0, np.uint8))


def decoded(tensor: Tensor, counts: Sequence[int]) -> list[Ids]:
    """Return the ids of several tables; ``counts``: number of ids of each.

    Raises:
        ProtocolError: they are not sorted unique ids in this number.
    """
    if tensor.dtype != "|u1" or len(tensor.shape) != 1:
        raise ProtocolError(f"ids are {tensor.dtype} of shape {tensor.shape}; expected bytes")
    data, at, found = tensor.array(), 0, []
    for count in counts:
        if count < 0 or count > len(data) - at:
            raise ProtocolError(f"{count} ids in {len(data) - at} bytes")
        stop = at + _HEAD if count else at
        width = int(data[stop - 1]) if at < stop <= len(data) else 0
        end = stop + width * (count - 1) if count else at
        if count and (not 1 <= width <= 8 or end > len(data)):
            raise ProtocolError(f"{count} ids with differences of {width} bytes in {len(data)}")
        found.append(_ids_of(data[at:end], count, width))
        at = end
    if at != len(data):
        raise ProtocolError(f"{len(data) - at} bytes follow the ids")
    return found


def _ids_of(data: NDArray[np.uint8], count: int, width: int) -> Ids:
    if not count:
        return np.empty(0, np.int64)
    steps = np.zeros((count, 8), np.uint8)
    steps[0] = data[:8]
    steps[1:, :width] = data[_HEAD:].reshape(count - 1, width)
    ids = steps.view("<u8").ravel().astype(np.uint64).cumsum(dtype=np.uint64).view(np.int64)
    if not (ids[1:] > ids[:-1]).all():
        raise ProtocolError("ids are not sorted and unique")
    return ids


def cut(counts: Sequence[int], row_nbytes: Sequence[int]) -> Iterator[list[Run]]:
    """Yield which rows go into each message, about a frame of them; none is left out."""
    parts: list[Run] = []
    room, lengths = FRAME_NBYTES, set[int]()
    for place, (count, nbytes) in enumerate(zip(counts, row_nbytes, strict=True)):
        start = 0
        while start < count:
            taken = min(count - start, max(1, room // nbytes))
            parts.append((place, slice(start, start + taken)))
            start, room = start + taken, room - taken * nbytes
            lengths.add(nbytes)
            if room < nbytes or len(parts) == MAX_PARTS or len(lengths) == MAX_LENGTHS:
                yield parts
                parts, room, lengths = [], FRAME_NBYTES, set()
    if parts:
        yield parts


def check_size(counts: Sequence[int], dims: Sequence[int]) -> None:
    """Refuse rows that no message of :func:`cut` has.

    Raises:
        ProtocolError: these are more bytes of rows than it puts into a message.
    """
    nbytes, most = 4 * sum(map(mul, counts, dims)), FRAME_NBYTES + 4 * max(dims, default=0)
    if nbytes > most:
        raise ProtocolError(f"{nbytes} bytes of rows in a message; expected at most {most}")


def chunks_of(
    given: Sequence[RowsOf], sequence: int, compression: Compression | None = None
) -> list[Part]:
    """Return the messages with the rows of a push, which are sent before it."""
    counts, row_nbytes = [len(each.ids) for each in given], [nbytes_of(each) for each in given]
    found: list[Part] = []
    for index, parts in enumerate(cut(counts, row_nbytes)):
        tables = tuple(given[place].table for place, _ in parts)
        chunk = RowChunk(sequence, index, tables, tuple(s.stop - s.start for _, s in parts))
        ids = encoded([given[place].ids[some] for place, some in parts])
        rows = encoded_rows([given[place].rows[some] for place, some in parts], compression)
        found.append((chunk, (ids, *rows)))
    return found


def nbytes_of(each: RowsOf) -> int:
    """Return the bytes of one row."""
    return 4 * int(each.rows.shape[1])


class _Plain:
    """Rows as they are, in the place of a compression."""

    spec, tensors = "none", 1

    def encode(self, chunk: Flat) -> tuple[Tensor, ...]:
        return (Tensor.of(chunk),)

    def decode(self, tensors: Sequence[Tensor], out: Flat) -> None:
        take_in(tensors, out)


_PLAIN = _Plain()


def _by_form(
    dims: Sequence[int], compression: Compression | None
) -> list[tuple[Compression | _Plain, list[int]]]:
    """Return the forms of several tables' rows, and the places of the tables that have each."""
    found: dict[str, tuple[Compression | _Plain, list[int]]] = {}
    for place, dim in enumerate(dims):
        form = (compression and compression.of_rows(dim)) or _PLAIN
        found.setdefault(form.spec, (form, []))[1].append(place)
    return [*found.values()]


def encoded_rows(rows: Sequence[Rows], compression: Compression | None) -> tuple[Tensor, ...]:
    """Return the rows of several tables as they travel; with a ``compression`` all are finite."""
    return tuple(
        tensor
        for form, places in _by_form([each.shape[1] for each in rows], compression)
        for tensor in form.encode(np.concatenate([rows[place].ravel() for place in places]))
    )


def rows_in(
    tensors: Sequence[Tensor],
    counts: Sequence[int],
    dims: Sequence[int],
    compression: Compression | None = None,
) -> list[Rows]:
    """Return the rows of several tables; ``counts``, ``dims``: number and length of its rows.

    Raises:
        ProtocolError: the tensors are others.
    """
    found: dict[int, Rows] = {}
    at = 0
    for form, places in _by_form(dims, compression):
        bounds = [0, *accumulate(counts[place] * dims[place] for place in places)]
        flat = np.empty(bounds[-1], np.float32)
        form.decode(tensors[at : at + form.tensors], flat)
        at += form.tensors
        for place, (start, stop) in zip(places, pairwise(bounds), strict=True):
            found[place] = flat[start:stop].reshape(-1, dims[place])
    if at != len(tensors):
        raise ProtocolError(f"{len(tensors)} tensors with rows; expected {at}")
    return [found[place] for place in range(len(dims))]


def joined(parts: Mapping[int, Sequence[RowsOf]]) -> list[RowsOf]:
    """Return the rows of each table, from the messages by their index.

    Raises:
        ProtocolError: the ids of a table are not sorted from message to message.
    """
    by_table: dict[int, list[RowsOf]] = {}
    for index in sorted(parts):
        for part in parts[index]:
            by_table.setdefault(part.table, []).append(part)
    found = []
    for table, several in sorted(by_table.items()):
        if len(several) == 1:
            found += several
            continue
        ids = np.concatenate([part.ids for part in several])
        if not (ids[1:] > ids[:-1]).all():
            raise ProtocolError(f"the ids of table {table} are not sorted from message to message")
        found.append(RowsOf(table, ids, np.concatenate([part.rows for part in several])))
    return found
