"""Long work runs in a thread, short work directly on the event loop.

Handing work to a thread costs about 100 us, as much as a small gradient; long work on the loop
would delay heartbeats. The duration of the last call decides.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

Result = TypeVar("Result")

LONG_S = 0.02


class Offload:
    """Runs one kind of work, one call at a time, in one thread or in place."""

    def __init__(self, name: str, *, in_place: bool = True) -> None:
        """``in_place``: whether short work may run on the event loop."""
        self.in_place = in_place
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._last_s = float("inf")  # the first call runs in the thread
        self._in_thread = 0  # calls

    async def run(self, work: Callable[[], Result]) -> Result:
        """Return the result of ``work``, or raise its error."""
        if self.in_place and self._last_s < LONG_S and not self._in_thread:
            return self._timed(work)
        return await self.run_in_thread(partial(self._timed, work))

    async def run_in_thread(self, work: Callable[[], Result]) -> Result:
        """Return the result of ``work``, run in the thread and not measured."""
        self._in_thread += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        finally:
            self._in_thread -= 1

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _timed(self, work: Callable[[], Result]) -> Result:
        started = time.perf_counter()
        try:
            return work()
        finally:
            self._last_s = time.perf_counter() - started


class _Daemons(Executor):
    """A thread for each call."""

    def submit(self, call: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Future[Result]:
        future = Future[Result]()

        def run() -> None:
            try:
                future.set_result(call(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        future.set_running_or_notify_cancel()
        threading.Thread(target=run, name="daemon", daemon=True).start()
        return future


async def in_daemon(call: Callable[..., Result], *args: Any) -> Result:
    """Do what asyncio.to_thread() does, in a thread that keeps no process from ending.

    So this may be cancelled while the call hangs, as at Ctrl-C.
    """
    run = partial(contextvars.copy_context().run, call, *args)
    return await asyncio.get_running_loop().run_in_executor(_Daemons(), run)
