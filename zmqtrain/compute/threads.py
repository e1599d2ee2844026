"""Threads that share one piece of work: a single core does not saturate the memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

from threadpoolctl import threadpool_limits

Call = Callable[[], None]

_limit: int | None = None  # of this process


class ThreadTeam:
    """A number of threads, including the caller's, that make calls in parallel."""

    def __init__(self, threads: int | None) -> None:
        """``threads``: None means one for each core that this process may use."""
        self._threads = threads or usable_cores()
        self._others = ThreadPoolExecutor(max(self._threads - 1, 1), thread_name_prefix="team")

    def run(self, calls: Sequence[Call]) -> None:
        """Make all calls, which should release the GIL.

        If some raise, one of the errors is raised after the running calls have ended, and some
        calls may not have been made.
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


def thread_limit() -> int | None:
    """Return the number given to :func:`limit_threads`, None if it was not called.

    A framework needs it that keeps a number for each thread.
    """
    return _limit


def usable_cores() -> int:
    return len(os.sched_getaffinity(0))


def _run_all(left: Iterator[Call]) -> None:
    """Make the calls that no thread has begun: a list iterator gives each to one thread only."""
    for call in left:
        call()
