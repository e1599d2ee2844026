"""Crash-safe changes of memory, with a redo log.

The memory is changed block by block. The new values of a block are written to a copy first; then a
progress word marks them as ready; then they are copied to their place, and another word marks them
as done. If the process is killed, the words show which elements have their new values, and a block
that was copied in part is copied again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from zmqtrain.compute.arrays import Flat

KERNEL_BLOCK = 4096
"""Elements that a kernel changes between two progress words; a block stays in L2."""

DONE, READY = 0, 1
"""Progress words: number of elements that have their new values, and of those that are ready."""


class Redo:
    """One crash-safe change of ``arrays``, all of shape (n,).

    ``copies``, one for each array, hold the new values of a block and limit its length.
    ``progress``: int64 of shape (2,). All three must survive the process.
    """

    def __init__(
        self, arrays: Sequence[Flat], copies: Sequence[Flat], progress: NDArray[np.int64]
    ) -> None:
        self.arrays = tuple(arrays)
        self.copies = tuple(copies)
        self.progress = progress

    def of(self, places: Sequence[int]) -> Redo:
        """Return the same change of some of the arrays; the others keep their values."""
        arrays, copies = ([each[n] for n in places] for each in (self.arrays, self.copies))
        return Redo(arrays, copies, self.progress)

    @property
    def done(self) -> int:
        """Elements that have their new values."""
        return self.progress.item(DONE)

    def begin(self) -> None:
        """Begin a change: no element is done."""
        self.progress.fill(0)

    def skip(self, stop: int) -> None:
        """Note that the elements up to ``stop`` keep their values."""
        self.progress[DONE] = stop

    def resume(self) -> None:
        """Finish the block at which a process was killed."""
        done, ready = self.progress.tolist()
        if ready > done:
            self._copy(slice(done, ready))

    def blocks(self, stop: int) -> Iterator[tuple[slice, list[Flat]]]:
        """Yield every remaining block up to ``stop``, and the arrays for its new values."""
        length = max(len(self.copies[0]), 1)
        for start in range(self.done, stop, length):
            block = slice(start, min(start + length, stop))
            yield block, [copy[: block.stop - block.start] for copy in self.copies]
            self.progress[READY] = block.stop
            self._copy(block)

    def _copy(self, block: slice) -> None:
        for array, copy in zip(self.arrays, self.copies, strict=True):
            np.copyto(array[block], copy[: block.stop - block.start])
        self.progress[DONE] = block.stop
