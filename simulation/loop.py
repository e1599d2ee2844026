"""An event loop in virtual time, and processes on it that can be stopped at any callback.

Time stands still while callbacks run and jumps to the next timer when none is left. Nothing waits,
no two threads run at a time, and no order depends on an address in memory.
"""

from __future__ import annotations

import asyncio
import heapq
import inspect
import itertools
import sys
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import Context, ContextVar, copy_context
from functools import partial
from random import Random
from types import CoroutineType, FrameType
from typing import Any, TypeVar, TypeVarTuple

LONGEST_S = 2.0  # that any work takes: the tasks' timeouts are made for that

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")

_current: ContextVar[Process | None] = ContextVar("process", default=None)


class Process:
    """A simulated process: a set of callbacks that run or stop together.

    A stopped process keeps its due callbacks in order. Once continued it catches up, as after
    SIGCONT; one that is never continued is dead, and none of its ``finally`` runs.
    """

    def __init__(self, name: str, work_s: float = 0.0) -> None:
        """``work_s``: mean duration of its work beside the event loop."""
        self.name = name
        self.work_s = work_s
        self.is_stopped = False
        self.held: list[asyncio.Handle] = []
        self._lines_left: int | None = None
        self._is_watched = False
        self._die: Callable[[], Callable[[], None]] | None = None
        self._bury: Callable[[], None] | None = None
        self.context = copy_context()
        self.context.run(_current.set, self)

    def __str__(self) -> str:
        return self.name

    def die_after(self, lines: int, die: Callable[[], Callable[[], None]]) -> None:
        """Call ``die``, which must stop this process, after this number of lines of its code.

        The function that it returns is called when the interrupted callback is unwound.
        """
        self._lines_left, self._die = lines, die

    def spare(self) -> None:
        """Call :meth:`die_after` off."""
        self._lines_left = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Do not count the lines of the simulation's own inspections in the block."""
        self._is_watched = True
        try:
            yield
        finally:
            self._is_watched = False

    @property
    def is_doomed(self) -> bool:
        return self._lines_left is not None

    def run(self, handle: asyncio.Handle) -> None:
        """Run a callback of a doomed process until it ends or dies."""
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            handle._run()
        finally:
            sys.settrace(before)
            if self._bury is not None:
                self._bury()
                self._bury = None

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if self._lines_left is None or self._is_watched or not _is_counted(frame):
            return None
        if event == "line":
            self._lines_left -= 1
            if self._lines_left < 0 and self._die is not None:
                self._lines_left = None
                self._bury = self._die()
                _close_unbegun(frame)
                raise Killed
        return self._trace


class Beside:
    """Work in a thread of its own, which runs only while the loop stands still.

    So it is as if the loop called it, but that it may wait for a coroutine on the loop.
    """

    def __init__(
        self, loop: VirtualLoop, work: Callable[[], Any], future: asyncio.Future[Any]
    ) -> None:
        self._loop, self._work, self._future = loop, work, future
        self._may_run, self._has_paused = threading.Semaphore(0), threading.Semaphore(0)
        self._is_killed = False
        run = partial(copy_context().run, self._run)
        threading.Thread(target=run, daemon=True).start()

    def go_on(self) -> None:
        """Let it run until it ends, or waits."""
        self._may_run.release()
        self._has_paused.acquire()

    def kill(self) -> None:
        """End work that waits."""
        self._is_killed = True
        self.go_on()

    def wait(self, task: asyncio.Task[Result]) -> Result:
        """Wait in its thread for a task of the loop, and return the result of that."""
        if not task.done():
            task.add_done_callback(lambda _: self.go_on())
            self._has_paused.release()
            self._may_run.acquire()
            if self._is_killed:
                raise Killed
        return task.result()

    def _run(self) -> None:
        self._may_run.acquire()
        _thread.beside = self
        try:
            result = self._work()
        except Exception as error:
            if not self._future.done():
                self._future.set_exception(error)
        except BaseException:
            self._future.cancel()
        else:
            if not self._future.done():
                self._future.set_result(result)
        finally:
            self._loop.ended(self)
            self._has_paused.release()


class _Current(threading.local):
    """The work of the thread that runs."""

    beside: Beside


_thread = _Current()


class Awaited:
    """A coroutine on the loop for which work waits: what asyncio.run_coroutine_threadsafe makes."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], loop: VirtualLoop) -> None:
        self._task = loop.create_task(coroutine)

    def result(self) -> Any:
        return _thread.beside.wait(self._task)

    def cancel(self) -> bool:
        return self._task.cancel()


class NothingLeftError(RuntimeError):
    """All processes wait, and no timer is left."""


class Killed(BaseException):
    """Unwinds the callback of a dying process."""


class _NumberedTask(asyncio.Task[Any]):
    """A task whose hash is its number: sets of tasks, as TaskGroup has, keep the same order."""

    def __init__(self, number: int, coroutine: Any, **options: Any) -> None:
        self._number = number
        super().__init__(coroutine, **options)

    def __hash__(self) -> int:
        return self._number


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs callbacks by their times, and those of one time in the order of their calls.

    The durations of work in threads are drawn from ``random``.
    """

    def __init__(self, random: Random, starts_at: float) -> None:
        super().__init__()
        self.errors: list[str] = []  # of callbacks
        self._now = starts_at
        self._random = random
        self._worked_s = 0.0
        self._numbers = itertools.count()
        self._task_numbers = itertools.count()
        self._due: deque[tuple[Process | None, asyncio.Handle]] = deque()
        self._timers: list[tuple[float, int, Process | None, asyncio.TimerHandle]] = []
        self._beside: set[Beside] = set()  # work that waits for this loop

    def time(self) -> float:
        return self._now

    def performance_counter(self) -> float:
        """Return a time that advances with work, and at every call."""
        self._worked_s += self._work_s()
        return self._now + self._worked_s

    def call_soon(
        self,
        callback: Callable[[*Arguments], object],
        *args: *Arguments,
        context: Context | None = None,
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._due.append((_process_of(context), handle))
        return handle

    call_soon_threadsafe = call_soon  # a thread runs only while the loop waits for it

    def call_at(
        self,
        when: float,
        callback: Callable[[*Arguments], object],
        *args: *Arguments,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        entry = (when, next(self._numbers), _process_of(context), handle)
        heapq.heappush(self._timers, entry)
        return handle

    def run_in_executor(  # type: ignore[override]  # typeshed knows no generic one
        self, executor: Any, function: Callable[..., Result], *args: Any
    ) -> asyncio.Future[Result]:
        """Call ``function`` at once, some virtual time later."""
        future: asyncio.Future[Result] = self.create_future()

        def work() -> None:
            if not future.cancelled():
                beside = Beside(self, partial(function, *args), future)
                self._beside.add(beside)
                beside.go_on()

        self.call_later(self._work_s(), work)
        return future

    def ended(self, beside: Beside) -> None:
        """Forget work that has ended."""
        self._beside.discard(beside)

    def close(self) -> None:
        for beside in tuple(self._beside):
            beside.kill()
        super().close()

    def create_task(
        self, coro: Generator[Any, None, Result] | Coroutine[Any, Any, Result], **options: Any
    ) -> asyncio.Task[Result]:
        return _NumberedTask(next(self._task_numbers), coro, loop=self, **options)

    def spawn(
        self, process: Process, coroutine: Coroutine[Any, Any, Result]
    ) -> asyncio.Task[Result]:
        """Begin a coroutine as part of a process; all that it starts is part of it too."""
        return self.create_task(coroutine, context=process.context)

    def resume(self, process: Process) -> None:
        """Continue a process that was stopped."""
        process.is_stopped = False
        self._due.extend((process, handle) for handle in process.held)
        process.held.clear()

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, Killed):
            return
        self.errors.append(f"{context['message']}: {type(error).__name__}: {error}")

    def run_until_complete(self, future: Any) -> Any:
        """Run until ``future`` is done.

        Raises:
            NothingLeftError: no callback is left.
        """
        task = asyncio.ensure_future(future, loop=self)
        asyncio._set_running_loop(self)
        try:
            while not task.done():
                self._run_what_is_due()
        finally:
            asyncio._set_running_loop(None)
        return task.result()

    def _work_s(self) -> float:
        process = _current.get()
        mean_s = 0.0 if process is None else process.work_s
        return min(LONGEST_S, self._random.expovariate(1 / mean_s)) if mean_s else 0.0

    def _run_what_is_due(self) -> None:
        timers, due = self._timers, self._due
        if not due:
            if not timers:
                raise NothingLeftError("nothing is left that could ever run")
            self._now = max(self._now, timers[0][0])
        while timers and timers[0][0] <= self._now:
            _, _, process, timer = heapq.heappop(timers)
            due.append((process, timer))
        for _ in range(len(due)):
            process, handle = due.popleft()
            if handle.cancelled():
                continue
            if process is not None and process.is_stopped:
                process.held.append(handle)
            elif process is not None and process.is_doomed:
                process.run(handle)
            else:
                handle._run()

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing: it is skipped when its time has come."""


def current_process() -> Process | None:
    """Return the process whose callback runs; None: it is the simulation itself."""
    return _current.get()


def unseen() -> AbstractContextManager[None]:
    """Return a context for inspections, whose lines do not count in the process."""
    process = _current.get()
    return process.watched() if process is not None and process.is_doomed else nullcontext()


def _close_unbegun(frame: FrameType | None) -> None:
    """Close coroutines of these functions that were never awaited."""
    of_tasks = {task.get_coro() for task in asyncio.all_tasks()}
    while frame is not None:
        for value in list(frame.f_locals.values()) if _is_counted(frame) else ():
            for each in value if isinstance(value, list) else [value]:  # a list: to be gathered
                if inspect.iscoroutine(each) and each not in of_tasks:
                    _close_if_unbegun(each)
        frame = frame.f_back


def _close_if_unbegun(coroutine: CoroutineType[Any, Any, Any]) -> None:
    """Close it, and those that it was given, unless it has begun."""
    if inspect.getcoroutinestate(coroutine) != inspect.CORO_CREATED:
        return
    frame = coroutine.cr_frame
    for given in list(frame.f_locals.values()) if frame is not None else ():
        if inspect.iscoroutine(given):
            _close_if_unbegun(given)
    coroutine.close()


def _is_counted(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith("zmqtrain.")


def _process_of(context: Context | None) -> Process | None:
    return _current.get() if context is None else context.get(_current)
