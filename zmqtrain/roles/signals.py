"""Which signals ask a process to end."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


def that_end() -> tuple[signal.Signals, ...]:
    """Return SIGTERM, SIGINT, and SIGHUP unless we were started to ignore it (nohup)."""
    others = (signal.SIGTERM, signal.SIGINT)
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return others if is_ignored else (*others, signal.SIGHUP)


@contextmanager
def restored() -> Iterator[list[signal.Signals]]:
    """Yield the signals that end a process; undo afterwards what the block does to them."""
    before = {number: signal.getsignal(number) for number in that_end()}
    try:
        yield list(before)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
