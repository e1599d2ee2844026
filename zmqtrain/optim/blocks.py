"""The one loop over memory: an update runs block by block, so that its scratch stays in cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from zmqtrain.compute.arrays import Flat

BLOCK_SIZE = 65_536
"""Elements in a block, 256 KiB: with less the calls cost time, with more the scratch leaves L2."""

DEVICE_BLOCK_SIZE = 1 << 24
"""Elements in a block on a GPU, where each costs kernel launches."""


class Block(NamedTuple):
    """The same run of each array of an update, all of shape (m,), m <= BLOCK_SIZE.

    ``scratch`` is uninitialised and is reused from block to block.
    """

    parameters: Flat
    gradient: Flat
    slots: Mapping[str, Flat]
    scratch: list[Flat]


def blocks(
    parameters: Flat, gradient: Flat, slots: Mapping[str, Flat], scratch: int
) -> Iterator[Block]:
    """Yield an update's arrays block by block, as views, with ``scratch`` buffers beside them.

    The buffers are all that is allocated: ``scratch`` times a block, whatever n is. They belong to
    this loop, so that one update may run inside a block of another.
    """
    size, length = len(parameters), block_size(parameters)
    buffers = list(np.empty_like(parameters, shape=(scratch, min(size, length))))
    if size <= length:
        yield Block(parameters, gradient, slots, buffers)
        return
    for run in runs(size, length):
        yield Block(
            parameters[run],
            gradient[run],
            {name: slot[run] for name, slot in slots.items()},
            [buffer[: run.stop - run.start] for buffer in buffers],
        )


def block_size(like: Flat, host: int = BLOCK_SIZE) -> int:
    """Return the elements of a block of such memory: ``host``, or more if it lies on a GPU."""
    return host if isinstance(like, np.ndarray) else DEVICE_BLOCK_SIZE


def runs(size: int, length: int, start: int = 0) -> Iterator[slice]:
    """Cut the elements from ``start`` to ``size`` into runs of ``length``, the last not longer."""
    for begin in range(start, size, length):
        yield slice(begin, min(begin + length, size))


def approach(average: Flat, target: Flat, share: np.float32, scratch: Flat) -> None:
    """average += share * (target - average), in place. ``target`` may be ``scratch`` itself."""
    np.subtract(target, average, out=scratch)
    np.multiply(scratch, share, out=scratch)
    np.add(average, scratch, out=average)


def root(square: Flat, inner: np.float32, outer: np.float32, out: Flat) -> None:
    """out = sqrt(square + inner) + outer. ``out`` may be ``square`` itself."""
    if inner:
        square = np.add(square, inner, out=out)
    np.sqrt(square, out=out)
    if outer:
        np.add(out, outer, out=out)
