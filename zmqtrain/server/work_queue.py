"""Work done strictly in order: short work on the event loop, long work beside it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeAlias, TypeVar

from zmqtrain.errors import ZmqTrainError

Result = TypeVar("Result")

_Queued: TypeAlias = tuple[Callable[[], Any] | None, Callable[[Any], None], bool, bool]

LONG_S = 0.005
"""Work that took longer than this goes to the thread the next time: handing it over costs some
0.1 ms, as much as a small update takes, and a heartbeat can wait for a few milliseconds."""


class WorkQueue:
    """Runs pairs of (work, then) one after another.

    ``work`` may run in a thread, ``then`` runs on the event loop after it. While long work runs
    the loop stays free for heartbeats; nothing later in the queue overtakes it. Work counts as
    long if the last one took long.

    Any error but the ZmqTrainError of a work goes to ``on_error``, and nothing later is done or
    accepted: the failed piece may be half done, which only the process's next life can finish.
    """

    def __init__(self, name: str, *, on_error: Callable[[Exception], None]) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._queue: deque[_Queued] = deque()
        self._on_error = on_error
        self._busy = False
        self._is_over = False  # closed, or something has failed
        self.paused = False  # nothing more is begun
        self.last_s = float("inf")  # duration of the last work; the first one counts as long

    def put(
        self,
        work: Callable[[], Result] | None,
        then: Callable[[Result | ZmqTrainError | None], None],
        *,
        rare: bool = False,
        first: bool = False,
        lasting: bool = False,
    ) -> None:
        """Queue work for the next :meth:`run`; ``first``: before all that is queued.

        ``then`` gets the result of the work, or its ZmqTrainError. ``rare`` work always goes to the
        thread and is not measured. ``lasting`` work is kept by :meth:`forget`.
        """
        if self._is_over:
            return
        add = self._queue.appendleft if first else self._queue.append
        add((work, then, rare, lasting))

    def forget(self) -> None:
        """Drop the queued work, except for lasting work."""
        self._queue = deque(queued for queued in self._queue if queued[-1])

    def run(self) -> None:
        """Do the queued work; on return all is done, or the first long work has begun."""
        while self._queue and not self._busy and not self.paused:
            self._busy = True
            work, then, rare, _ = self._queue.popleft()
            if work is not None and (rare or self.last_s > LONG_S):
                beside = work if rare else partial(self._timed, work)
                future = asyncio.get_running_loop().run_in_executor(self._thread, beside)
                future.add_done_callback(partial(self._resume, then))
                return
            try:
                then(None if work is None else self._outcome(work))
            except Exception as error:
                self._fail(error)
            self._busy = False

    def close(self) -> None:
        """Do nothing more; return once the work that has begun has ended."""
        self._end()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _end(self) -> None:
        self._is_over = True
        self._queue.clear()

    def _fail(self, error: Exception) -> None:
        self._end()
        self._on_error(error)  # a ZmqTrainError of ``then``, too: nobody would expect it from run()

    def _outcome(self, work: Callable[[], Result]) -> Result | ZmqTrainError:
        try:
            return self._timed(work)
        except ZmqTrainError as error:
            return error

    def _timed(self, work: Callable[[], Result]) -> Result:
        started = time.perf_counter()
        try:
            return work()
        finally:
            self.last_s = time.perf_counter() - started

    def _resume(self, then: Callable[[Any], None], done: asyncio.Future[Any]) -> None:
        if done.cancelled():
            return
        try:
            error = done.exception()
            if error is not None and not isinstance(error, ZmqTrainError):
                raise error
            if self._is_over:
                return
            then(done.result() if error is None else error)
            self._busy = False
            self.run()
        except Exception as raised:
            self._fail(raised)
