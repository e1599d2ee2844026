"""Large tensors in pieces: each is a message of its own, so that sending, receiving and taking in
overlap, and no message keeps a heartbeat waiting.

A tensor of one piece rides in the message that speaks of it. A larger one goes ahead of it in
`Piece` messages, and the message itself carries nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from zmqtrain.errors import ProtocolError
from zmqtrain.wire.buffers import FRAME_NBYTES, Tensor
from zmqtrain.wire.messages import Piece

Flat: TypeAlias = NDArray[np.float32]

PIECE_SIZE = FRAME_NBYTES // 4
"""Elements in a piece, 2 MiB."""

Ahead: TypeAlias = tuple[tuple[Piece, tuple[Tensor, ...]], ...]
"""What goes ahead of a message."""


def count(size: int) -> int:
    """Return the number of pieces of ``size`` elements; nothing is one piece."""
    return max(1, -(-size // PIECE_SIZE))


def cut(flat: Flat) -> Iterator[Flat]:
    """Yield the pieces of ``flat``, float32 of shape (n,), as views."""
    for index in range(count(len(flat))):
        yield flat[index * PIECE_SIZE : (index + 1) * PIECE_SIZE]


def at(flat: Flat, index: int) -> Flat:
    """Return a view of the piece that a peer calls ``index``.

    Raises:
        ProtocolError: there is none.
    """
    if not 0 <= index < count(len(flat)):
        raise ProtocolError(f"piece {index} of {count(len(flat))}")
    return flat[index * PIECE_SIZE : (index + 1) * PIECE_SIZE]


def travelling(flat: Flat, sequence: int = 0) -> tuple[Ahead, tuple[Tensor, ...]]:
    """Return what goes ahead of a message that speaks of ``flat``, and what rides in it.

    All of it are views of ``flat``.
    """
    tensors = [(Tensor.of(piece),) for piece in cut(flat)]
    if len(tensors) == 1:
        return (), tensors[0]
    return tuple((Piece(sequence, index), tensor) for index, tensor in enumerate(tensors)), ()
