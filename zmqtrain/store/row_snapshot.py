"""The rows of a store as they are at one moment, read by another thread while the store changes.

Whatever is about to change a record copies it first, once, into a log beside the store. A reader
takes blocks of records, or those with some ids, and from the log those that have changed since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zmqtrain.errors import CheckpointError
from zmqtrain.store.table_layout import HEADER

_BLOCK = 1 << 12  # records that are copied at once: a change waits for it, about a millisecond


class RowSnapshot:
    """Rows at the moment at which this is made."""

    def __init__(
        self,
        heads: NDArray[np.int64],
        rows: int,
        widths: Sequence[int],
        own: Callable[[NDArray[np.int64]], NDArray[np.bool_]] | None = None,
    ) -> None:
        """``heads``: all records ever used, of which ``rows`` are no longer free, and chosen.

        ``own``: chooses among ids; None: all.
        """
        self._heads, self._widths, self._own = heads, widths, own
        self._lock, self._kept = Lock(), 0
        self._is_over = False
        self.is_for_others = False  # other processes may have changed the store meanwhile
        self._order: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
        count = len(heads)
        self._log = np.empty_like(heads)  # takes memory as it is filled
        self._kept_as = np.zeros(count, np.int32 if count < 1 << 31 else np.int64)  # 0: not kept
        self.rows = rows

    @contextmanager
    def before_a_change(self, places: NDArray[np.int64]) -> Iterator[None]:
        """Keep the content of these records, which no thread may read until they have changed."""
        with self._lock:
            if not self._is_over:
                own = places[places < len(self._heads)]
                own = own[self._kept_as[own] == 0]
                begin, self._kept = self._kept, self._kept + len(own)
                np.take(self._heads, own, 0, self._log[begin : self._kept], "clip")
                self._kept_as[own] = np.arange(begin + 1, self._kept + 1)
            yield

    def keep_all(self) -> None:
        """Keep all records, because later changes by other processes do not keep them."""
        self.is_for_others = True
        for begin in range(0, len(self._heads) if self._kept < len(self._heads) else 0, _BLOCK):
            with self.before_a_change(np.arange(begin, min(begin + _BLOCK, len(self._heads)))):
                pass

    def close(self) -> None:
        """Give up: the store is about to lose its rows, or they have been read."""
        with self._lock:
            self._is_over = True
            self._log, self._kept_as = np.empty((0, 0), np.int64), np.empty(0, np.int32)

    def blocks(self) -> Iterator[list[NDArray[Any]]]:
        """Yield ids, sorted over all blocks, second words, and (n, width) of each width.

        Raises:
            CheckpointError: the store has lost its rows meanwhile.
        """
        _, places = self._in_order()
        for begin in range(0, len(places), _BLOCK):
            own = places[begin : begin + _BLOCK]
            records = self._records(own)
            floats = records.view(np.float32)
            bounds = pairwise(accumulate(self._widths, initial=2 * HEADER))
            yield [records[:, 0], records[:, 1], *(floats[:, a:b] for a, b in bounds)]
        self.close()

    def read(
        self, ids: NDArray[np.int64], places: NDArray[np.int64], *, forgets: bool
    ) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Return the rows with these ids, shape (n, dim), and which of them there were.

        A row that there was not is arbitrary. ``places``: where the ids are now, -1: nowhere.
        ``forgets``: rows may have been forgotten meanwhile, so that their ids are nowhere now.

        Raises:
            CheckpointError: the store has lost its rows meanwhile.
        """
        found, is_there = self._at(ids, places)
        missing = np.flatnonzero(~is_there)
        if forgets and len(missing) and self.rows:
            every, then = self._in_order()
            at = np.minimum(np.searchsorted(every, ids[missing]), len(every) - 1)
            found[missing], is_there[missing] = self._at(ids[missing], then[at])
        return found, is_there

    def _at(
        self, ids: NDArray[np.int64], places: NDArray[np.int64]
    ) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Return the rows in these places, and whether they are those of the ids."""
        if not len(self._heads):
            return np.empty((len(ids), self._widths[0]), np.float32), np.zeros(len(ids), np.bool_)
        records = self._records(np.clip(places, 0, len(self._heads) - 1))
        is_place = (places >= 0) & (places < len(self._heads))
        is_there = is_place & (records[:, 0] == ids) & (records[:, 1] >= 0)
        begin = 2 * HEADER
        return records.view(np.float32)[:, begin : begin + self._widths[0]], is_there

    def _records(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        with self._reading():
            records = np.take(self._heads, places, 0)
            kept = self._kept_as[places]
            if (changed := np.flatnonzero(kept)).size:
                records[changed] = self._log[kept[changed] - 1]
        return records

    def _in_order(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the ids of the rows, sorted, and their places."""
        # Two threads may sort at the same time, with the same result. A cached_property would lock
        # all snapshots at once before Python 3.12.
        if self._order is None:
            self._order = self._sorted()
        return self._order

    def _sorted(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        ids, places = np.empty(self.rows, np.int64), np.empty(self.rows, np.int64)
        end = 0
        for begin in range(0, len(self._heads), _BLOCK):
            with self._reading():
                heads = self._heads[begin : begin + _BLOCK, :HEADER].copy()
                kept = self._kept_as[begin : begin + _BLOCK]
                changed = np.flatnonzero(kept)
                heads[changed] = self._log[kept[changed] - 1, :HEADER]
            live = np.flatnonzero(heads[:, 1] >= 0)
            if self._own is not None:
                live = live[self._own(heads[live, 0])]
            own = slice(end, end + len(live))
            ids[own], places[own] = heads[live, 0], begin + live
            end = own.stop
        order = np.argsort(ids)
        return ids[order], places[order]

    @contextmanager
    def _reading(self) -> Iterator[None]:
        with self._lock:
            if self._is_over:
                raise CheckpointError(
                    "the rows of a table are no longer those of this checkpoint, for the shard "
                    "ends or begins anew"
                )
            yield
