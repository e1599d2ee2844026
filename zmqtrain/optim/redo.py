"""Changes of memory that a killed process leaves whole.

The memory is changed run by run: a run's new values are written beside it; when all are there, a
word says so; they are copied to their place, and another word says that. So whenever the process
is killed, each element has its old value or its new one, and which is known; what was copied in
part is copied again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from zmqtrain.compute.arrays import Flat

BLOCK = 4096
"""Elements that a kernel changes between two words of progress: all that they touch stays in L2."""

DONE, READY = 0, 1
"""Words of the progress: elements that have their new values; those whose new values are ready."""


class Redo:
    """The way through some ``arrays``, all of one shape (n,).

    ``areas``, one beside each array, hold a run's new values, so a run is at most as long as they.
    ``progress``: int64 of shape (2,). Who is to finish the change must find it with all of these.
    """

    def __init__(
        self, arrays: Sequence[Flat], areas: Sequence[Flat], progress: NDArray[np.int64]
    ) -> None:
        self.arrays = tuple(arrays)
        self.areas = tuple(areas)
        self.progress = progress

    @property
    def done(self) -> int:
        """Elements that have their new values."""
        return int(self.progress[DONE])

    def begin(self) -> None:
        """No element is done."""
        self.progress[:] = 0

    def resume(self) -> None:
        """Finish the run that a killed process left."""
        done, ready = self.progress.tolist()
        if ready > done:
            self._copy(slice(done, ready))

    def runs(self, stop: int) -> Iterator[tuple[slice, list[Flat]]]:
        """Yield every run up to ``stop`` that is to be done, and where to put its new values."""
        for start in range(self.done, stop, max(len(self.areas[0]), 1)):
            run = slice(start, min(start + len(self.areas[0]), stop))
            yield run, [area[: run.stop - run.start] for area in self.areas]
            self.progress[READY] = run.stop
            self._copy(run)

    def _copy(self, run: slice) -> None:
        for array, area in zip(self.arrays, self.areas, strict=True):
            np.copyto(array[run], area[: run.stop - run.start])
        self.progress[DONE] = run.stop
