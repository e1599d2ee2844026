"""Work done strictly in order: short pieces on the event loop, long ones beside it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

Work = Callable[[], None]


class WorkQueue:
    """Runs pairs of (work, then) one after another.

    ``work`` may run in a thread, ``then`` runs on the event loop after it. While a long piece runs
    the loop stays free for heartbeats; nothing later in the queue overtakes it.
    """

    def __init__(
        self, name: str, *, long_work: bool, on_error: Callable[[Exception], None]
    ) -> None:
        """``long_work``: whether pieces of work take so long that they belong in a thread."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name) if long_work else None
        self._queue: deque[tuple[Work | None, Work]] = deque()
        self._on_error = on_error
        self._busy = False

    def add(self, then: Work, work: Work | None = None) -> None:
        """Queue one piece; if nothing is before it and it is short, it is done on return."""
        self._queue.append((work, then))
        if not self._busy:
            self._run()

    def close(self) -> None:
        self._queue.clear()
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)

    def _run(self) -> None:
        while self._queue:
            work, then = self._queue.popleft()
            self._busy = True
            if work is not None and self._thread is not None:
                future = asyncio.get_running_loop().run_in_executor(self._thread, work)
                future.add_done_callback(partial(self._resume, then))
                return
            try:
                if work is not None:
                    work()
                then()
            finally:
                self._busy = False

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
