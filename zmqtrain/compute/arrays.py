"""The array type of shards, gradients and updates, and blocks of its elements."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Flat: TypeAlias = NDArray[np.float32]
"""A contiguous float32 array of shape (n,), of NumPy or, on a GPU, of CuPy."""

ALIGNMENT_NBYTES = 64  # frameworks take arrays at multiples of it without a copy

PAGES_FROM_NBYTES = 64 << 10
"""From this size on, an array of :func:`zeros` has whole pages of its own, as CUDA pins them."""


BLOCK_SIZE = 65_536
"""Elements in a block, 256 KiB, whose intermediate results stay in the cache: smaller ones cost
calls, larger ones do not fit into L2."""

DEVICE_BLOCK_SIZE = 1 << 24  # elements in a block on a GPU, where each costs kernel launches


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


def block_size(like: Flat) -> int:
    """Return the block size for this memory, which may be on a GPU."""
    return BLOCK_SIZE if isinstance(like, np.ndarray) else DEVICE_BLOCK_SIZE


def blocks(size: int, length: int = BLOCK_SIZE, start: int = 0) -> Iterator[slice]:
    """Cut the elements from ``start`` to ``size`` into blocks of ``length``, or less at the end."""
    for begin in range(start, size, length):
        yield slice(begin, min(begin + length, size))
