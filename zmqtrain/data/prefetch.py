"""Reading batches before they are needed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock

from zmqtrain.data.batches import BatchPlan
from zmqtrain.data.stream import StreamPlan
from zmqtrain.data.subset import layers, take_seeded
from zmqtrain.models.base import Batch, Dataset

QUICK_S = 0.001
"""Reading in another thread costs both threads some 0.2 ms, which is lost if a read is faster."""

_FADING = 0.99
"""The time of a slow read fades over some hundred reads, as another may be slow, too."""


class Prefetcher:
    """Reads the batches of a plan ahead of time, in one background thread.

    Batches are not read ahead while reading one takes less than ``quick_s``, nor if the data set,
    or one that it wraps, has ``may_be_read_ahead = False``. At most ``limit`` batches are held,
    finished or not. Two threads never call ``Dataset.take`` at once. One thread calls ``prepare``,
    ``forget`` and ``close``; another may call ``take``.
    """

    def __init__(
        self,
        dataset: Dataset,
        plan: BatchPlan | StreamPlan,
        limit: int = 64,
        quick_s: float = QUICK_S,
        clock: Callable[[], float] | None = None,
        on_read: Callable[[int, Batch], None] | None = None,
    ) -> None:
        """``on_read``: called with the number of each batch and it, in the thread that reads."""
        self._clock = time.monotonic if clock is None else clock
        self._dataset = dataset
        self._plan = plan
        self._limit = limit
        self._quick_s = quick_s
        self._on_read = on_read
        self._slow_s = 2 * quick_s  # the longest of the last reads; not known yet
        self._reading = Lock()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._futures: dict[int, Future[Batch]] = {}
        self._reads_ahead = _may_be_read_ahead(dataset)

    def read_ahead_always(self) -> None:
        """Read batches ahead even if reads are quick."""
        self._quick_s = 0

    def prepare(self, number: int) -> bool:
        """Start reading batch ``number``, unless it was started before.

        Returns whether the batch is held. It is not if ``limit`` others are held, if reads are
        quick, or after ``close``; then ``take`` reads it.
        """
        if number in self._futures:
            return True
        if (
            not self._reads_ahead
            or len(self._futures) >= self._limit
            or self._slow_s < self._quick_s
        ):
            return False
        self._futures[number] = self._executor.submit(self._read, number)
        return True

    def take(self, number: int) -> Batch:
        """Return batch ``number`` and release it.

        If it was prepared, wait for it; otherwise read it in the calling thread.

        Raises:
            Exception: whatever ``Dataset.take`` raised for this batch.
        """
        future = self._futures.pop(number, None)
        return self._read(number) if future is None else future.result()

    def forget(self, numbers: Iterable[int]) -> None:
        """Release prepared batches that will not be taken."""
        for number in numbers:
            future = self._futures.pop(number, None)
            if future is not None:
                future.cancel()

    def close(self) -> None:
        """Forget every batch and end the thread, waiting for a read in progress."""
        self._reads_ahead = False
        self.forget(tuple(self._futures))
        self._executor.shutdown()

    def _read(self, number: int) -> Batch:
        with self._reading:
            started = self._clock()
            plan = self._plan
            indices = plan.indices(number)
            batch = take_seeded(self._dataset, indices, plan.seed, plan.passes(number))
            if self._on_read is not None:
                self._on_read(number, batch)
            self._slow_s = max(self._clock() - started, _FADING * self._slow_s)
            return batch


def _may_be_read_ahead(dataset: Dataset) -> bool:
    said = (getattr(layer, "may_be_read_ahead", None) for layer in layers(dataset))
    return bool(next((each for each in said if each is not None), True))
