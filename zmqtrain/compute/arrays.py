"""The array type of shards, gradients and updates."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Flat: TypeAlias = NDArray[np.float32]
"""A contiguous float32 array of shape (n,), of NumPy or, on a GPU, of CuPy."""

ALIGNMENT_NBYTES = 64
"""Frameworks take arrays at multiples of it without a copy."""


def zeros(size: int) -> Flat:
    """Return float32 zeros of shape (size,), aligned."""
    memory = np.zeros(4 * size + ALIGNMENT_NBYTES, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT_NBYTES
    return memory[start : start + 4 * size].view(np.float32)


def read_only(array: NDArray[Any]) -> NDArray[Any]:
    """Return a read-only view of an array."""
    view = array.view()
    view.flags.writeable = False
    return view


def is_writable(array: Any) -> bool:
    """Return whether a write to an array of parameters counts: not if it is a copy on a GPU."""
    return isinstance(array, np.ndarray) and array.flags.writeable
