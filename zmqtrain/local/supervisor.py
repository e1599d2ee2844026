"""A process under supervision: started, minded, started again; signals are passed on to it."""

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
from collections.abc import Callable, Sequence
from functools import partial

from zmqtrain.config.restarts import End, Ending, Limits, decide
from zmqtrain.errors import ConfigError
from zmqtrain.roles import signals

_PR_SET_PDEATHSIG = 1  # from linux/prctl.h

log = logging.getLogger(__name__)


async def supervise(command: Sequence[str], limits: Limits) -> int:
    """Run ``command``, again as long as that may help; return the exit code to end with.

    From the return on, this process ignores the signals that end a supervision.

    Raises:
        ConfigError: the command cannot be started.
    """
    name = f"{shlex.join(command):.100}"
    stop = _Stop()
    endings: list[Ending] = []
    try:
        while True:
            started_at = time.monotonic()
            process = await _start(command)
            stop.watch_over(process)
            returncode = await process.wait()
            endings.append(Ending(returncode, started_at, time.monotonic()))
            if stop.number is not None:
                return endings[-1].exit_code
            decision = decide(endings, limits, random.random())
            if isinstance(decision, End):
                if decision.reason:
                    log.error("%s %s: %s", name, endings[-1], decision.reason)
                return decision.exit_code
            log.warning(
                "%s %s: it starts again in %.1f s; %d of %d restarts within %g s are left",
                name,
                endings[-1],
                decision.delay_s,
                decision.left,
                limits.max_restarts,
                limits.within_s,
            )
            if await stop.comes_within(decision.delay_s):
                return stop.exit_code
    finally:
        stop.ignore()


class _Stop:
    """The first signal that ended the supervision, if one has come; each is passed on."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._came = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        loop = asyncio.get_running_loop()
        self._numbers = signals.that_end()
        for number in self._numbers:
            # Not add_signal_handler: to end its handling it lets the signal kill for a moment.
            signal.signal(number, lambda n, _: loop.call_soon_threadsafe(self._take, n))

    @property
    def exit_code(self) -> int:
        """The code to end with if the signal found no process."""
        return 128 + (self.number or 0)

    def watch_over(self, process: asyncio.subprocess.Process) -> None:
        """Pass signals on to this process from now on, and one that has come before."""
        self._process = process
        if self.number is not None:
            self._pass_on(self.number)

    async def comes_within(self, limit_s: float) -> bool:
        """Wait for a signal; say whether one came in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._came.wait()
        return self._came.is_set()

    def ignore(self) -> None:
        """Let nothing disturb the exit: whoever ends first may have honcho stop the others."""
        for number in self._numbers:
            signal.signal(number, signal.SIG_IGN)

    def _take(self, number: int) -> None:
        if self.number is None:
            self.number = number
            self._came.set()
        self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        if self._process is not None and self._process.returncode is None:
            # Not send_signal: if it has ended this moment, that takes its exit code from asyncio.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)


async def _start(command: Sequence[str]) -> asyncio.subprocess.Process:
    """Start a process that shares our group, input and output, and does not outlive us."""
    try:
        return await asyncio.create_subprocess_exec(*command, preexec_fn=_bond())
    except OSError as error:
        raise ConfigError(
            f"cannot start {command[0]!r}: {error.strerror}; expected a program on PATH, or the "
            "path of one"
        ) from None


def _bond() -> Callable[[], None] | None:
    """Return what a child has to call so that it dies with this process, where that is possible.

    Without it a child that lost its supervisor would keep its address, and nobody minded it.
    """
    if sys.platform != "linux":
        return None
    return partial(_die_with, os.getpid(), ctypes.CDLL(None).prctl)


def _die_with(parent: int, prctl: Callable[..., int]) -> None:
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it has died already, so the signal will not come
        os.kill(os.getpid(), signal.SIGKILL)
