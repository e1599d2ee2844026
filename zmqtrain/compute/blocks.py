"""Blocks of elements, so small that intermediate results stay in the cache."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from zmqtrain.compute.arrays import Flat

BLOCK_SIZE = 65_536
"""Elements in a block, 256 KiB: smaller ones cost calls, larger ones do not fit into L2."""

DEVICE_BLOCK_SIZE = 1 << 24
"""Elements in a block on a GPU, where each costs kernel launches."""


def block_size(like: Flat) -> int:
    """Return the block size for this memory, which may be on a GPU."""
    return BLOCK_SIZE if isinstance(like, np.ndarray) else DEVICE_BLOCK_SIZE


def blocks(size: int, length: int = BLOCK_SIZE, start: int = 0) -> Iterator[slice]:
    """Cut the elements from ``start`` to ``size`` into blocks of ``length``, or less at the end."""
    for begin in range(start, size, length):
        yield slice(begin, min(begin + length, size))
