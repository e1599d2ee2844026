"""Large tensors in chunks: each is a message of its own, so that sending, receiving and decoding
overlap, and no message delays a heartbeat.

A tensor of one chunk is inline: part of its message. A larger one is sent before that message, in
`Chunk` messages, each as its values or as a compression encodes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TypeAlias

import numpy as np

from zmqtrain.compute.arrays import Flat
from zmqtrain.errors import ProtocolError
from zmqtrain.wire.buffers import FRAME_NBYTES, Tensor
from zmqtrain.wire.messages import Chunk, RowChunk

CHUNK_SIZE = FRAME_NBYTES // 4  # elements in a chunk, 1 MiB
WINDOW_NBYTES = 8 << 20  # bytes of chunks that a worker may send to a ps without acknowledgement
MESSAGES_NBYTES = 2 * WINDOW_NBYTES  # memory for them at a ps: the allocator keeps a freed copy

Part: TypeAlias = tuple[Chunk | RowChunk, tuple[Tensor, ...]]
"""A message that is sent before another one, and its tensors."""

Encode: TypeAlias = Callable[[int, Flat], tuple[Tensor, ...]]
"""Encodes ``flat[start : start + n]``, given the start and this part."""

Add: TypeAlias = Callable[[int, Sequence[Tensor], Flat], None]
"""Adds an encoded difference to ``flat[start : start + n]``, given the start, it and this part."""


def count(size: int) -> int:
    """Return the number of chunks of ``size`` elements; nothing is one chunk."""
    return max(1, -(-size // CHUNK_SIZE))


def at(flat: Flat, index: int) -> Flat:
    """Return a view of chunk ``index``.

    Raises:
        ProtocolError: there is none.
    """
    if not 0 <= index < count(len(flat)):
        raise ProtocolError(f"chunk {index} of {count(len(flat))}")
    return flat[index * CHUNK_SIZE : (index + 1) * CHUNK_SIZE]


def as_it_is(start: int, chunk: Flat) -> tuple[Tensor, ...]:
    """Send the values themselves, without a copy."""
    return (Tensor.of(chunk),)


class Chunks:
    """The parts that are sent before a message: chunks of a tensor, each encoded on first use and
    kept, then rows of tables.

    Chunks are sent in the order of the tensor or, if ``in_order`` is False, in the order of
    :meth:`add`, while the tensor is computed.
    """

    def __init__(
        self,
        flat: Flat | None,
        sequence: int,
        encode: Encode,
        *,
        in_order: bool = True,
        is_difference: bool = False,
    ) -> None:
        """``flat``: None if it is in the message itself."""
        self._flat = np.empty(0, np.float32) if flat is None else flat
        self._count = 0 if flat is None else count(len(flat))
        self._sequence = sequence
        self._encode = encode
        self._is_difference = is_difference
        self._order: dict[int, None] = {}  # part by part
        self._made: list[Part] = []
        self._rows: Sequence[Part] = ()
        if in_order:
            self.add(range(len(self)))

    def add(self, indices: Iterable[int]) -> None:
        """Add parts to send next; those added before are ignored."""
        self._order.update(dict.fromkeys(indices))

    def end_with(self, rows: Sequence[Part]) -> None:
        """Add all chunks that are left, and behind them rows."""
        self._rows = rows
        self.add(range(len(self)))

    @property
    def ready(self) -> int:
        """The number of parts that may be sent."""
        return len(self._order)

    def __len__(self) -> int:
        return self._count + len(self._rows)

    def __getitem__(self, place: int) -> Part:
        """Return the part at a place in the sending order, below ``ready``."""
        for number in islice(self._order, len(self._made), place + 1):
            self._made.append(self._part(number))
        return self._made[place]

    def __iter__(self) -> Iterator[Part]:
        return (self[place] for place in range(len(self)))

    def _part(self, number: int) -> Part:
        if number >= self._count:
            return self._rows[number - self._count]
        tensors = self._encode(number * CHUNK_SIZE, at(self._flat, number))
        return Chunk(self._sequence, number, self._is_difference), tensors


class ChunkAssembler:
    """Assembles received chunks into parameters, and counts the missing ones.

    An answer may come more than once, with other parameters; only chunks of one version and form
    count together. Those of a difference are added when all are there, so each is added once.
    """

    def __init__(self, out: Flat, add: Add | None = None) -> None:
        """``out``: receives parameters, float32 of shape (size,). ``add``: adds a difference."""
        self._out, self._add = out, add
        self._form = -1, False  # version of the chunks that came, and whether of a difference
        self._came: dict[int, Sequence[Tensor]] = {}  # without the tensors that are taken in
        self._is_base = True  # ``out`` holds the base of a difference

    @property
    def has_chunks(self) -> bool:
        return bool(self._came)

    def take(self, chunk: Chunk, tensors: Sequence[Tensor]) -> None:
        """Take in a chunk.

        Raises:
            ProtocolError: it is not a chunk of these parameters.
        """
        out = at(self._out, chunk.index)
        if not chunk.is_difference:
            take_in(tensors, out)
            self._is_base, tensors = False, ()
        if (form := (chunk.sequence, chunk.is_difference)) != self._form:
            self._form = form
            self._came.clear()
        self._came[chunk.index] = tensors

    def finish(
        self, version: int, tensors: Sequence[Tensor], *, is_difference: bool = False
    ) -> int:
        """Take in the inline tensors of the answer; return the number of its lost chunks.

        Raises:
            ProtocolError: there are other tensors than parameters of this size have.
        """
        expected = count(len(self._out))
        if expected == 1:
            if is_difference:
                self._add_all({0: tensors})
            else:
                take_in(tensors, self._out)
            return 0
        if tensors:
            raise ProtocolError(f"{len(tensors)} tensors beside parameters in {expected} chunks")
        came = self._came if self._form == (version, is_difference) else {}
        if is_difference and len(came) == expected:
            self._add_all(came)
        return expected - len(came)

    def _add_all(self, differences: Mapping[int, Sequence[Tensor]]) -> None:
        if self._add is None or not self._is_base:
            raise ProtocolError("got a difference, expected all parameters")
        for index, tensors in differences.items():
            self._add(index * CHUNK_SIZE, tensors, at(self._out, index))


def split(
    flat: Flat, sequence: int = 0, encode: Encode = as_it_is, *, is_difference: bool = False
) -> tuple[Chunks | None, tuple[Tensor, ...]]:
    """Return the chunks to send before a message with ``flat``, or its inline tensors."""
    if count(len(flat)) == 1:
        return None, encode(0, flat)
    return Chunks(flat, sequence, encode, is_difference=is_difference), ()


def take_in(tensors: Sequence[Tensor], out: Flat) -> None:
    """Copy the inline values of a message into ``out``.

    Raises:
        ProtocolError: they are not those of one tensor like ``out``.
    """
    if len(tensors) != 1:
        raise ProtocolError(f"got {len(tensors)} tensors, expected one of {len(out)} elements")
    tensors[0].copy_to(out)
