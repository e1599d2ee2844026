"""Large tensors in chunks: each is a message of its own, so that sending, receiving and decoding
overlap, and no message delays a heartbeat.

A tensor of one chunk is inline: part of its message. A larger one is sent before that message, in
`Chunk` messages, and the message itself carries nothing. A chunk is sent as its values, or as a
compression encodes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Protocol, TypeAlias

from zmqtrain.compute.arrays import Flat
from zmqtrain.errors import ProtocolError
from zmqtrain.wire.buffers import FRAME_NBYTES, Tensor
from zmqtrain.wire.messages import Chunk, RowChunk

CHUNK_SIZE = FRAME_NBYTES // 4
"""Elements in a chunk, 1 MiB."""

WINDOW_NBYTES = 8 << 20
"""Bytes of chunks that a worker may send to a ps without acknowledgement."""

MESSAGES_NBYTES = 2 * WINDOW_NBYTES
"""Memory for these chunks at a ps: the allocator keeps a freed copy."""

Part: TypeAlias = tuple[Chunk | RowChunk, tuple[Tensor, ...]]
"""A message that is sent before another one, and its tensors."""

Encode: TypeAlias = Callable[[int, Flat], tuple[Tensor, ...]]
"""Encodes ``flat[start : start + n]``, given the start and this part."""


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


class Parts(Protocol):
    """What is sent before a message."""

    @property
    def ready(self) -> int:
        """The number of parts that may be sent."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, place: int) -> Part:
        """Return the part at a place in the sending order, below ``ready``."""
        ...

    def add(self, indices: Iterable[int]) -> None:
        """Add parts to send next; those added before are ignored."""
        ...


class Chunks:
    """The chunks that are sent before a message; each is encoded on first use and kept.

    They are sent in the order of the tensor or, if ``in_order`` is False, in the order of
    :meth:`add`, while the tensor is computed.
    """

    def __init__(self, flat: Flat, sequence: int, encode: Encode, *, in_order: bool = True) -> None:
        self._flat = flat
        self._sequence = sequence
        self._encode = encode
        self._order: dict[int, None] = {}  # chunk by chunk
        self._made: list[tuple[Chunk, tuple[Tensor, ...]]] = []
        if in_order:
            self.add(range(len(self)))

    def add(self, indices: Iterable[int]) -> None:
        """Add chunks to send next; those added before are ignored."""
        self._order.update(dict.fromkeys(indices))

    @property
    def ready(self) -> int:
        """The number of chunks that may be sent."""
        return len(self._order)

    def __len__(self) -> int:
        return count(len(self._flat))

    def __getitem__(self, place: int) -> tuple[Chunk, tuple[Tensor, ...]]:
        """Return the chunk at a place in the sending order, below ``ready``."""
        for number in islice(self._order, len(self._made), place + 1):
            tensors = self._encode(number * CHUNK_SIZE, at(self._flat, number))
            self._made.append((Chunk(self._sequence, number), tensors))
        return self._made[place]

    def __iter__(self) -> Iterator[tuple[Chunk, tuple[Tensor, ...]]]:
        return (self[place] for place in range(len(self)))


class ChunkAssembler:
    """Assembles received chunks into parameters, and counts the missing ones.

    An answer may come more than once, with other parameters; only chunks of one version count
    together.
    """

    def __init__(self, out: Flat) -> None:
        """``out``: receives the parameters, float32 of shape (size,)."""
        self._out = out
        self._version = -1  # of the chunks that came
        self._came: set[int] = set()

    def take(self, chunk: Chunk, tensors: Sequence[Tensor]) -> None:
        """Take in a chunk.

        Raises:
            ProtocolError: it is not a chunk of these parameters.
        """
        take_in(tensors, at(self._out, chunk.index))
        if chunk.sequence != self._version:
            self._version = chunk.sequence
            self._came.clear()
        self._came.add(chunk.index)

    def finish(self, version: int, tensors: Sequence[Tensor]) -> int:
        """Take in the inline tensors of the answer; return the number of its lost chunks.

        Raises:
            ProtocolError: there are other tensors than parameters of this size have.
        """
        expected = count(len(self._out))
        if expected == 1:
            take_in(tensors, self._out)
            return 0
        if tensors:
            raise ProtocolError(f"{len(tensors)} tensors beside parameters in {expected} chunks")
        return expected - (len(self._came) if version == self._version else 0)


def split(
    flat: Flat, sequence: int = 0, encode: Encode = as_it_is
) -> tuple[Chunks | None, tuple[Tensor, ...]]:
    """Return the chunks to send before a message with ``flat``, or its inline tensors."""
    if count(len(flat)) == 1:
        return None, encode(0, flat)
    return Chunks(flat, sequence, encode), ()


def take_in(tensors: Sequence[Tensor], out: Flat) -> None:
    """Copy the inline values of a message into ``out``.

    Raises:
        ProtocolError: they are not those of one tensor like ``out``.
    """
    if len(tensors) != 1:
        raise ProtocolError(f"got {len(tensors)} tensors, expected one of {len(out)} elements")
    tensors[0].copy_to(out)
