"""The array type of shards, gradients and updates."""

from __future__ import annotations

import mmap
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Flat: TypeAlias = NDArray[np.float32]
"""A contiguous float32 array of shape (n,), of NumPy or, on a GPU, of CuPy."""

ALIGNMENT_NBYTES = 64
"""Frameworks take arrays at multiples of it without a copy."""

PAGES_FROM_NBYTES = 64 << 10
"""From this size on, an array of :func:`zeros` has whole pages of its own, as CUDA pins them."""


def zeros(size: int) -> Flat:
    """Return float32 zeros of shape (size,), aligned, in memory that CUDA can register."""
    nbytes = 4 * size
    unit = ALIGNMENT_NBYTES if nbytes < PAGES_FROM_NBYTES else mmap.PAGESIZE
    owner = np.zeros(-(-nbytes // unit) * unit + unit, np.uint8)
    memory = np.asarray(owner.data)  # compute/pinning.py holds the owner until it is done
    start = -memory.ctypes.data % unit
    return memory[start : start + nbytes].view(np.float32)


def read_only(array: NDArray[Any]) -> NDArray[Any]:
    """Return a read-only view of an array."""
    view = array.view()
    view.flags.writeable = False
    return view


def is_writable(array: Any) -> bool:
    """Return whether a write to an array of parameters counts: not if it is a copy on a GPU."""
    return isinstance(array, np.ndarray) and array.flags.writeable
