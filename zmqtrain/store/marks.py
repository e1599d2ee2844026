"""A mark for each worker in the segment of a shard: some bytes, replaced as a whole.

There are two halves for each, of which at most one is valid: a new mark goes into the other one,
then one word says which is valid, and its size. A killed process leaves the old or the new one.
"""

from __future__ import annotations

from collections.abc import Iterator

from zmqtrain.store.segment import Segment
from zmqtrain.store.segment_layout import MARK_NBYTES, MAX_WORKERS

_WORD = 8  # first in each row: 4 * size of the mark + number of its half, 1 or 2; 0: there is none

MAX_MARK_NBYTES = (MARK_NBYTES - _WORD) // 2


class Marks:
    """The marks of one segment. Workers beyond ``MAX_WORKERS`` leave none."""

    def __init__(self, segment: Segment) -> None:
        self._memory = segment.marks
        self._words = segment.marks.cast("q")

    def write(self, worker: int, mark: bytes) -> bool:
        """Replace a worker's mark; False: it is too long, and the one before is still there."""
        size = len(mark)
        if size > MAX_MARK_NBYTES:
            return False
        if worker < MAX_WORKERS:
            row = worker * MARK_NBYTES
            half = 2 if self._words[row // _WORD] % 4 == 1 else 1
            at = row + _WORD + (half - 1) * MAX_MARK_NBYTES
            self._memory[at : at + size] = mark
            self._words[row // _WORD] = 4 * size + half
        return True

    def clear(self) -> None:
        for row in range(0, MAX_WORKERS * MARK_NBYTES, MARK_NBYTES):
            if self._words[row // _WORD]:
                self._words[row // _WORD] = 0

    def read(self) -> Iterator[tuple[int, bytes]]:
        for worker in range(MAX_WORKERS):
            row = worker * MARK_NBYTES
            size, half = divmod(self._words[row // _WORD], 4)
            if half:
                at = row + _WORD + (half - 1) * MAX_MARK_NBYTES
                yield worker, bytes(self._memory[at : at + size])
