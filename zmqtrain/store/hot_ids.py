"""The ids of a table that are trained most often, estimated from samples of its updates."""

from __future__ import annotations

import time
from collections import deque
from itertools import count

import numpy as np

from zmqtrain.models.tables import Ids

_SHOWN = 10
_UPDATES = 4  # of which ids are counted then, the last ones


class HotIds:
    """Counts ids by samples of updates.

    As in Space-Saving (Metwally, Agrawal, El Abbadi: Efficient Computation of Frequent and Top-k
    Elements in Data Streams, 2005) the ids with the lowest counts make room for new ones; a new one
    begins with its own count, so counts are at most what was sampled.

    ``kept``: ids that are counted, and of an update sampled, at most. ``every_s``: between counts.
    """

    def __init__(self, kept: int = 1024, every_s: float = 1.0) -> None:
        self._kept, self._every_s = kept, every_s
        self._ids, self._counts = np.empty(0, np.int64), np.empty(0, np.int64)
        self._seen: deque[Ids] = deque(maxlen=_UPDATES)
        self._turns, self._due_at = count(), 0.0
        self._hottest: tuple[tuple[int, int], ...] = ()

    def saw(self, ids: Ids) -> None:
        """Take the sorted unique ids of an update, any thread's; it costs a copy of some."""
        step = max(-(-len(ids) // self._kept), 1)
        self._seen.append(ids[next(self._turns) % step :: step].copy())

    def hottest(self) -> tuple[tuple[int, int], ...]:
        """Return at most 10 ids and their counts, the highest first, as of a second ago."""
        if self._seen and time.monotonic() >= self._due_at:
            self._due_at = time.monotonic() + self._every_s
            seen = [self._seen.popleft() for _ in range(len(self._seen))]
            ids, places = np.unique(np.concatenate([self._ids, *seen]), return_inverse=True)
            counts = np.bincount(places[len(self._ids) :], minlength=len(ids))
            counts[places[: len(self._ids)]] += self._counts
            order = np.lexsort((ids, -counts))
            kept = np.sort(order[: self._kept])
            self._ids, self._counts = ids[kept], counts[kept]
            top = order[:_SHOWN]
            self._hottest = tuple(zip(ids[top].tolist(), counts[top].tolist(), strict=True))
        return self._hottest
