"""Threads that share one chunk of work: a core alone is slower than the memory, by far."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

Call = Callable[[], None]


class ThreadTeam:
    """So many threads, the caller's among them, that do things side by side."""

    def __init__(self, threads: int | None) -> None:
        """``threads``: None is one for each core that this process may use."""
        self._threads = threads or usable_cores()
        # Its threads begin when there is work for them, and end with this object.
        self._others = ThreadPoolExecutor(max(self._threads - 1, 1), thread_name_prefix="team")

    def do(self, calls: Sequence[Call]) -> None:
        """Do all calls, which should let go of the GIL.

        If some raise, one error is raised when no call is under way any more, and some calls may
        not have been made.
        """
        wanted = min(self._threads, len(calls)) - 1
        if wanted < 1:
            for call in calls:
                call()
            return
        left = iter(calls)
        others = [self._others.submit(_do_all, left) for _ in range(wanted)]
        try:
            _do_all(left)
        finally:
            late = [other for other in others if not other.cancel()]  # those that have begun
            wait(late)
        for other in late:
            other.result()


def usable_cores() -> int:
    return len(os.sched_getaffinity(0))


def _do_all(left: Iterator[Call]) -> None:
    """Do the calls that nobody has begun: an iterator of a list gives each to one thread alone."""
    for call in left:
        call()
