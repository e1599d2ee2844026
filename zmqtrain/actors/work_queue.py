"""Work done strictly in order: short work on the event loop, long ones beside it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

Work = Callable[[], None]

LONG_S = 0.005
"""Work that took longer than this goes to the thread the next time: handing it over costs some
0.1 ms, as much as a small update takes, and a heartbeat can wait for a few milliseconds."""


class WorkQueue:
    """Runs pairs of (work, then) one after another.

    ``work`` may run in a thread, ``then`` runs on the event loop after it. While long work runs
    the loop stays free for heartbeats; nothing later in the queue overtakes it. Whether work is
    long is told by how long the last of it took.
    """

    def __init__(self, name: str, *, on_error: Callable[[Exception], None]) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._queue: deque[tuple[Work | None, Work, bool]] = deque()
        self._on_error = on_error
        self._busy = False
        self._last_s = float("inf")  # unknown work is long until it was seen to be short

    def add(self, then: Work, work: Work | None = None, *, rare: bool = False) -> None:
        """Queue one piece of work; if nothing is before it and it is short, it is done on return.

        ``rare`` work always goes to the thread, and tells nothing of how long the rest takes.
        """
        self._queue.append((work, then, rare))
        if not self._busy:
            self._run()

    def close(self) -> None:
        self._queue.clear()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _run(self) -> None:
        while self._queue:
            work, then, rare = self._queue.popleft()
            self._busy = True
            if work is not None and (rare or self._last_s > LONG_S):
                beside = work if rare else partial(self._timed, work)
                future = asyncio.get_running_loop().run_in_executor(self._thread, beside)
                future.add_done_callback(partial(self._resume, then))
                return
            try:
                if work is not None:
                    self._timed(work)
                then()
            finally:
                self._busy = False

    def _timed(self, work: Work) -> None:
        started = time.perf_counter()
        work()
        self._last_s = time.perf_counter() - started

    def _resume(self, then: Work, done: asyncio.Future[None]) -> None:
        if done.cancelled():
            return
        try:
            done.result()
            then()
        except Exception as error:
            self._on_error(error)
        self._busy = False
        try:
            self._run()
        except Exception as error:
            self._on_error(error)
