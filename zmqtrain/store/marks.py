"""A mark for each worker in the segment of a shard: some bytes, replaced as a whole.

There are two halves for each, of which at most one is valid: a new mark goes into the other one,
then one word says that it is the valid one. So a killed process leaves the old mark or the new one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from zmqtrain.store.segment import Segment
from zmqtrain.store.segment_layout import MARK_NBYTES, MAX_WORKERS

_WORD = 8  # first in each row: 0: there is no mark; 1 or 2: it is in this half
_SIZE = struct.Struct("<Q")  # first in each half
_HALF_NBYTES = (MARK_NBYTES - _WORD) // 2

MAX_MARK_NBYTES = _HALF_NBYTES - _SIZE.size


class Marks:
    """The marks of one segment. Workers beyond ``MAX_WORKERS`` leave none."""

    def __init__(self, segment: Segment) -> None:
        self._memory = segment.marks
        self._words = segment.marks.cast("q")

    def write(self, worker: int, mark: bytes) -> bool:
        """Replace a worker's mark; False: it is too long, and the one before is still there."""
        if len(mark) > MAX_MARK_NBYTES:
            return False
        if worker < MAX_WORKERS:
            row = self._row(worker)
            half = 2 if self._words[row] == 1 else 1
            content = _SIZE.pack(len(mark)) + mark
            at = self._at(worker, half)
            self._memory[at : at + len(content)] = content
            self._words[row] = half
        return True

    def clear(self) -> None:
        """Forget every worker."""
        for worker in range(MAX_WORKERS):
            if self._words[self._row(worker)]:
                self._words[self._row(worker)] = 0

    def read(self) -> Iterator[tuple[int, bytes]]:
        """Yield each worker that has a mark, and the mark."""
        for worker in range(MAX_WORKERS):
            half = self._words[self._row(worker)]
            if half:
                at = self._at(worker, half)
                (size,) = _SIZE.unpack_from(self._memory, at)
                yield worker, bytes(self._memory[at + _SIZE.size :][:size])

    def _row(self, worker: int) -> int:
        """Return the index of the word of a worker's row."""
        return worker * MARK_NBYTES // _WORD

    def _at(self, worker: int, half: int) -> int:
        return worker * MARK_NBYTES + _WORD + (half - 1) * _HALF_NBYTES
