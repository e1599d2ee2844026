"""Changes of memory that a killed process leaves whole.

The memory is changed block by block: a block's new values are written beside it; when all are
there, a word says so; they are copied to their place, and another word says that. So whenever the
process is killed, each element has its old value or its new one, and which is known; what was
copied in part is copied again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from zmqtrain.compute.arrays import Flat

KERNEL_BLOCK = 4096
"""Elements that a kernel changes between two words of progress: all that they touch stays in L2."""

DONE, READY = 0, 1
"""Words of the progress: elements that have their new values; those whose new values are ready."""


class Redo:
    """The way through some ``arrays``, all of one shape (n,).

    ``copies``, one beside each array, hold a block's new values, so a block is at most as long as
    they. ``progress``: int64 of shape (2,). Who is to finish the change must find it with all of
    these.
    """

    def __init__(
        self, arrays: Sequence[Flat], copies: Sequence[Flat], progress: NDArray[np.int64]
    ) -> None:
        self.arrays = tuple(arrays)
        self.copies = tuple(copies)
        self.progress = progress

    @property
    def done(self) -> int:
        """Elements that have their new values."""
        return int(self.progress[DONE])

    def begin(self) -> None:
        """No element is done."""
        self.progress[:] = 0

    def resume(self) -> None:
        """Finish the block that a killed process left."""
        done, ready = self.progress.tolist()
        if ready > done:
            self._copy(slice(done, ready))

    def blocks(self, stop: int) -> Iterator[tuple[slice, list[Flat]]]:
        """Yield every block up to ``stop`` that is to be done, and where to put its new values."""
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
