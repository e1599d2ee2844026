"""Processes that are restarted when they crash, and die with the process that started them."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import random
import shlex
import signal
import sys
import time
import warnings
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Protocol

from zmqtrain.actors.waits import within
from zmqtrain.config.restarts import SUPERVISED_SINCE, End, Ending, Limits, Restart, decide
from zmqtrain.errors import ConfigError
from zmqtrain.hints import host_error
from zmqtrain.hosting import signals

_PR_SET_PDEATHSIG = 1  # from linux/prctl.h

log = logging.getLogger(__name__)


class Process(Protocol):
    """The part of an `asyncio.subprocess.Process` that is used here."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    async def wait(self) -> int: ...


async def start(
    command: Sequence[str], death_signal: signal.Signals, **options: Any
) -> asyncio.subprocess.Process:
    """Start a process; on Linux it gets ``death_signal`` when this one dies.

    ``options`` are those of `asyncio.create_subprocess_exec`.

    Raises:
        ConfigError: the command cannot be started.
    """
    prepare = dying_with(death_signal)
    # JAX warns that its threads and a fork deadlock; this one becomes another program at once.
    warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
    try:
        return await asyncio.create_subprocess_exec(*command, preexec_fn=prepare, **options)
    except OSError as error:
        raise host_error(error) or ConfigError(
            f"cannot start {command[0]!r}: {error.strerror}; expected a program on PATH, or the "
            "path of one"
        ) from None


async def keep_running(
    name: str,
    start_process: Callable[[], Awaitable[Process]],
    limits: Limits,
    is_over: Callable[[], bool],
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    on_restart: Callable[[Restart], None] = lambda restart: None,
) -> tuple[Ending, End]:
    """Start a process, and restart it each time that it crashes.

    It is not restarted once ``is_over`` returns True. ``sleep`` waits before a restart, for the
    given seconds or until it is over. ``on_restart`` is called before that. Returns how the last
    run ended, and why there is no further restart.
    """
    endings: list[Ending] = []
    while True:
        started_at = time.monotonic()
        process = await start_process()
        returncode = await process.wait()
        endings.append(Ending(returncode, started_at, time.monotonic()))
        if is_over():
            return endings[-1], End()
        decision = decide(endings, limits, random.random())
        if isinstance(decision, End):
            return endings[-1], decision
        log.warning(
            "%s %s: restarting in %.1f s; %d of %d restarts within %g s are left",
            name,
            endings[-1],
            decision.delay_s,
            decision.left,
            limits.max_restarts,
            limits.within_s,
        )
        on_restart(decision)
        await sleep(decision.delay_s)
        if is_over():
            return endings[-1], End()


async def supervise(command: Sequence[str], limits: Limits) -> int:
    """Run ``command``; restart it while that may help; return the exit code to end with.

    Signals that stop a process are passed on to it. After the return this process ignores them.

    Raises:
        ConfigError: the command cannot be started.
    """
    stop = _Stop()
    # A worker that waits for a ps compares it with the time at which the job ended.
    os.putenv(SUPERVISED_SINCE, str(time.time()))

    async def start_command() -> asyncio.subprocess.Process:
        # If it outlived us, it would keep its address, and nothing would restart it.
        process = await start(command, signal.SIGKILL)
        stop.pass_on_to(process)
        return process

    try:
        name = f"{shlex.join(command):.100}"
        ending, end = await keep_running(name, start_command, limits, stop.has_come, stop.wait)
        if end.reason:
            log.error("%s %s: %s", name, ending, end.reason)
        return stop.exit_code or end.exit_code or ending.exit_code
    finally:
        stop.ignore()


class _Stop:
    """Passes stop signals on to the process, and remembers the first."""

    def __init__(self) -> None:
        self.exit_code = 0  # to end with, if there was no process to signal
        self._number: int | None = None
        self._came = asyncio.Event()
        self._process: Process | None = None
        loop = asyncio.get_running_loop()
        self._numbers = signals.that_end()
        for number in self._numbers:
            # Not add_signal_handler: while it is removed, a signal would kill this process.
            signal.signal(number, lambda n, _: loop.call_soon_threadsafe(self._take, n))

    def has_come(self) -> bool:
        return self._number is not None

    def pass_on_to(self, process: Process) -> None:
        """Pass signals on to this process, including one that has already come."""
        self._process, self.exit_code = process, 0
        if self._number is not None:
            self._pass_on(self._number)

    async def wait(self, limit_s: float) -> None:
        """Wait for a signal, at most ``limit_s`` seconds."""
        await within(limit_s, self._came)

    def ignore(self) -> None:
        """Ignore signals during the exit: honcho sends them to all when the first process ends."""
        for number in self._numbers:
            signal.signal(number, signal.SIG_IGN)

    def _take(self, number: int) -> None:
        if self._number is None:
            self._number = number
            self._came.set()
            if self._process is None or self._process.returncode is not None:
                self.exit_code = 128 + number
        self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        if self._process is not None and self._process.returncode is None:
            # Not send_signal: it polls, and could take the exit code away from asyncio.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)


def dying_with(number: signal.Signals) -> Callable[[], None] | None:
    """Return a function that gives a child this signal when this process dies.

    None on systems other than Linux, which have no such call.
    """
    if sys.platform != "linux":
        return None
    return partial(_die_with, os.getpid(), number, ctypes.CDLL(None).prctl)


def _die_with(parent: int, number: signal.Signals, prctl: Callable[..., int]) -> None:
    prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:  # it has died already: the signal would not come
        os.kill(os.getpid(), number)
