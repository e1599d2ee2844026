"""The sum of a step's gradients of rows: the list of its contributions, one behind the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from zmqtrain.models.tables import RowsOf
from zmqtrain.store.changes import float_of, word_of
from zmqtrain.store.row_buffer import get, nbytes_of, put
from zmqtrain.store.table_layout import SUM_BEFORE, SUM_END
from zmqtrain.store.table_memory import TableMemory

Contributed: TypeAlias = tuple[list[RowsOf], float]
"""The rows of a gradient, by table, and its weight."""

_HEAD = 64  # bytes before a contribution: bytes up to the next one, and its weight


class RowSum:
    """The sum of all tables of a shard, in memory that outlives the process."""

    def __init__(self, memory: TableMemory) -> None:
        self._arena, self._words, self._at = memory.arena, memory.words, memory.layout.sum_at
        self._dims = [table.variable.dim for table in memory.layout.tables]

    def begin(self, given: Sequence[Contributed], *, goes_on: bool) -> None:
        """Make room for contributions, behind those that are there if it ``goes_on``.

        Raises:
            SegmentError: there is no room.
        """
        before = self._words[SUM_END] if goes_on else 0
        self._arena.reserve(self._at + before, sum(_nbytes(parts) for parts, _ in given))
        self._words[SUM_BEFORE] = before

    def add(self, given: Sequence[Contributed]) -> None:
        """Add the contributions for which there is room, or finish that."""
        at = self._words[SUM_BEFORE]
        for parts, weight in given:
            put(self._arena.memory, self._at + at + _HEAD, parts)
            end = at + _nbytes(parts)
            self._arena.ints(self._at + at, 2)[:] = end, word_of(weight)
            at = end
        self._words[SUM_END] = at

    def read(self) -> list[Contributed]:
        """Return all contributions: views."""
        found: list[Contributed] = []
        at = 0
        while at < self._words[SUM_END]:
            end, weight = self._arena.ints(self._at + at, 2).tolist()
            parts = get(self._arena.memory, self._at + at + _HEAD, self._dims)
            found.append((parts, float_of(weight)))
            at = end
        return found

    def clear(self) -> None:
        self._words[SUM_END] = 0


def _nbytes(parts: Sequence[RowsOf]) -> int:
    return _HEAD + -(-nbytes_of(parts) // 64) * 64
