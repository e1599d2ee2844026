"""The signals that end a process, and how none is lost while the process starts."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


def that_end() -> tuple[signal.Signals, ...]:
    """Return SIGTERM, SIGINT, and SIGHUP unless we were started to ignore it (nohup)."""
    others = (signal.SIGTERM, signal.SIGINT)
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return others if is_ignored else (*others, signal.SIGHUP)


@contextmanager
def restored() -> Iterator[list[signal.Signals]]:
    """Yield the signals that end a process; restore their handlers after the block.

    Only the main thread may change handlers; elsewhere there is nothing to undo.
    """
    if threading.current_thread() is not threading.main_thread():
        yield []
        return
    before = {number: signal.getsignal(number) for number in that_end()}
    try:
        yield list(before)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def interrupts_kept() -> Iterator[None]:
    """Raise KeyboardInterrupt at the end of the block if Ctrl-C came in it, and was lost.

    An error that a signal raises in a callback of Python is printed and lost. Imports call back.
    """
    interrupts: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        signal.default_int_handler(number, frame)

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # it is ignored
        yield
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is note:  # the block may have installed its own
            signal.signal(signal.SIGINT, signal.default_int_handler)
    if interrupts:
        raise KeyboardInterrupt
