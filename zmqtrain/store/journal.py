"""What a ps leaves in its segment for its next life: the leader's journal, and workers' marks.

The journal is a state, and the entries since. There are two halves, of which one is valid: a new
state goes into the other, then one word says that it is the valid one. An entry counts from the
moment that the word of the half's end includes it. Of each mark there are two halves, too, of which
at most one is valid: a new mark goes into the other one, then one word says which is valid, and its
size. So whenever the process is killed, a whole state, whole entries, and the old mark or the new
one are found.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from zmqtrain.store.segment import Segment
from zmqtrain.store.segment_layout import (
    GENERATION,
    JOURNAL,
    JOURNAL_END,
    JOURNAL_NBYTES,
    JOURNAL_ROOM_NBYTES,
    MARK_NBYTES,
    MAX_WORKERS,
)

_SIZE = struct.Struct("<Q")
_WORD = 8  # first in each row: 4 * size of the mark + number of its half, 1 or 2; 0: there is none

MAX_MARK_NBYTES = (MARK_NBYTES - _WORD) // 2


class Journal:
    """The journal that the leader keeps in a segment."""

    def __init__(self, segment: Segment) -> None:
        self._words = segment.words
        self._memory = segment.journal

    def begin(self, state: bytes) -> bool:
        """Start over with a state; False: it would leave little room in a half."""
        if len(state) > JOURNAL_NBYTES // 2:
            return False
        half = 1 - self._words[JOURNAL]
        self._words[JOURNAL_END + half] = self._write(half, 0, state)
        self._words[JOURNAL] = half
        return True

    def append(self, entry: bytes) -> bool:
        """Add an entry; False: there is no room, so :meth:`begin` again.

        There is as much room as the state took, so what states cost does not outgrow the entries.
        """
        half = self._words[JOURNAL]
        end = self._words[JOURNAL_END + half]
        (state_nbytes,) = _SIZE.unpack_from(self._memory, half * JOURNAL_NBYTES)
        if end + _SIZE.size + len(entry) > max(JOURNAL_ROOM_NBYTES, 2 * state_nbytes):
            return False
        self._words[JOURNAL_END + half] = self._write(half, end, entry)
        return True

    def give_up(self) -> None:
        """Mark the segment as unusable for the next life of the process."""
        self._words[GENERATION] = 0

    def read(self) -> list[bytes]:
        """Return the state and the entries since."""
        half = self._words[JOURNAL]
        at, end = 0, self._words[JOURNAL_END + half]
        found = []
        while at < end:
            (size,) = _SIZE.unpack_from(self._memory, half * JOURNAL_NBYTES + at)
            at += _SIZE.size
            found.append(bytes(self._memory[half * JOURNAL_NBYTES + at :][:size]))
            at += size
        return found

    def _write(self, half: int, at: int, data: bytes) -> int:
        """Write at a place of a half; return the place after it."""
        place = half * JOURNAL_NBYTES + at
        _SIZE.pack_into(self._memory, place, len(data))
        place += _SIZE.size
        self._memory[place : place + len(data)] = data
        return at + _SIZE.size + len(data)


class Marks:
    """A mark for each worker: some bytes, replaced as a whole. Workers beyond ``MAX_WORKERS`` leave
    none."""

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
