"""Arrays on the wire: a dtype, a shape, and their bytes in parts of bounded size."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from zmqtrain.errors import ProtocolError

Buffer: TypeAlias = bytes | memoryview

FRAME_NBYTES = 1 << 20
"""Largest frame of a tensor: sending, receiving and applying overlap, and no frame starves a
heartbeat (loopback throughput is highest between 1 and 4 MiB). On a slow link a sender shows life
with each frame: at 1.7 Mbit/s once in a lease of 5 s."""

MAX_DIMENSIONS = 8
MAX_FRAMES = 1 << 16  # of one message: at most 64 GiB of tensors
DTYPES = frozenset({"<f2", "<f4", "<f8", "<i4", "<i8", "|i1", "|u1"})


@dataclass(slots=True)
class Tensor:
    """An array that is sent or received: in C order, its bytes are ``parts``, end to end.

    On the sending side the parts are views of the array given to :meth:`of`, which must not change
    until the transport's ``send`` has returned. On the receiving side they are views of received
    frames, valid as long as the tensor is referenced.
    """

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Buffer, ...]

    @classmethod
    def of(cls, array: NDArray[Any]) -> Tensor:
        """View a C-contiguous array as a tensor, without a copy."""
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        parts = tuple(data[i : i + FRAME_NBYTES] for i in range(0, len(data), FRAME_NBYTES))
        return cls(array.dtype.str, array.shape, parts)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * int(self.dtype[2:])

    def copy_to(self, out: NDArray[Any]) -> None:
        """Copy the bytes into ``out``.

        Raises:
            ProtocolError: dtype or shape are not those of ``out``.
            ValueError: ``out`` is not C-contiguous.
        """
        if self.dtype != out.dtype.str or self.shape != out.shape:
            raise ProtocolError(
                f"got a tensor of {self.dtype} {list(self.shape)}, expected {out.dtype.str} "
                f"{list(out.shape)}: both tasks must run the same job with the same number of ps"
            )
        if not out.flags.c_contiguous:
            raise ValueError("the bytes of a tensor are copied into C-contiguous arrays only")
        target = out.reshape(-1).view(np.uint8).data
        start = 0
        for part in self.parts:
            stop = start + len(part)
            target[start:stop] = part
            start = stop

    def array(self) -> NDArray[Any]:
        """Return the values as a new array."""
        out: NDArray[Any] = np.empty(self.shape, self.dtype)
        self.copy_to(out)
        return out


def shown(value: Any) -> str:
    """Return the start of a decoded value's repr; all of it may be long, or too deep for repr."""
    return f"{reprlib.repr(value):.80}"


def check_tensor(dtype: Any, shape: Any) -> tuple[str, tuple[int, ...]]:
    """Validate the header of a tensor before its bytes are read.

    Raises:
        ProtocolError: no array of this dtype and shape can be sent.
    """
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ProtocolError(f"tensor dtype {shown(dtype)} is not one of {sorted(DTYPES)}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS:
        raise ProtocolError(
            f"tensor shape {shown(shape)} is not a list of at most {MAX_DIMENSIONS}"
        )
    for extent in shape:
        if type(extent) is not int or extent < 0:
            raise ProtocolError(
                f"tensor shape {shown(shape)} holds {shown(extent)}, expected whole numbers"
            )
    # NumPy refuses extents beyond its index type even where another extent is 0.
    if prod(max(extent, 1) for extent in shape) > MAX_FRAMES * FRAME_NBYTES:
        raise ProtocolError(f"tensor shape {shown(shape)} is larger than any message")
    return dtype, tuple(shape)
