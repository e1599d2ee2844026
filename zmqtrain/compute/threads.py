"""Threads that share one piece of work: a single core does not saturate the memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager

from threadpoolctl import threadpool_limits

Call = Callable[[], None]

_limit: int | None = None  # of this process
_own = threading.local()  # ``limit`` of a thread that has a share


class ThreadTeam:
    """A number of threads, including the caller's, that make calls in parallel."""

    def __init__(self, threads: int | None) -> None:
        """``threads``: None means one for each core that this process may use."""
        self._threads = threads or usable_cores()
        self._others = ThreadPoolExecutor(max(self._threads - 1, 1), thread_name_prefix="team")

    def run(self, calls: Sequence[Call]) -> None:
        """Make all calls, which should release the GIL.

        If some raise, an error is raised once the running calls have ended; others may not be made.
        """
        wanted = min(self._threads, len(calls)) - 1
        if wanted < 1:
            for call in calls:
                call()
            return
        left = iter(calls)
        others = [self._others.submit(_run_all, left) for _ in range(wanted)]
        try:
            _run_all(left)
        finally:
            late = [other for other in others if not other.cancel()]  # those that have begun
            wait(late)
        for other in late:
            other.result()


def limit_threads(threads: int) -> None:
    """Set how many threads of linear algebra this process uses."""
    global _limit
    _limit = threads
    threadpool_limits(threads)


@contextmanager
def limit_restored() -> Iterator[None]:
    """Restore the limit of the process after the block."""
    global _limit
    before, limits = _limit, threadpool_limits()
    try:
        yield
    finally:
        _limit = before
        limits.restore_original_limits()


def thread_limit() -> int | None:
    """Return the calling thread's limit of linear algebra threads, None without one.

    Frameworks with a limit for each thread need it.
    """
    limit: int | None = getattr(_own, "limit", _limit)
    return limit


class Shares:
    """The threads of linear algebra of this process, divided among some of its threads."""

    _lock = threading.Lock()
    _in_use = 0
    _before: threadpool_limits | None = None

    def __init__(self, parties: int) -> None:
        self._each = max(1, (thread_limit() or usable_cores()) // parties)
        with self._lock:
            if not Shares._in_use:
                Shares._before = threadpool_limits(self._each)
            Shares._in_use += 1

    def take(self) -> None:
        """Give the calling thread its share."""
        _own.limit = self._each

    def end(self) -> None:
        """Restore the limit of the process once no other shares are in use."""
        with self._lock:
            Shares._in_use -= 1
            if not Shares._in_use and Shares._before is not None:
                Shares._before.restore_original_limits()


def usable_cores() -> int:
    """Return how many cores this process may use: all, where the system has no affinity."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    return (os.cpu_count() or 1) if affinity is None else len(affinity(0))


def _run_all(left: Iterator[Call]) -> None:
    """Make the calls that no thread has begun: a list iterator gives each to one thread only."""
    for call in left:
        call()
