"""Which signals ask a process to end."""

from __future__ import annotations

import signal


def that_end() -> tuple[signal.Signals, ...]:
    """Return SIGTERM, SIGINT, and SIGHUP unless we were started to ignore it (nohup)."""
    others = (signal.SIGTERM, signal.SIGINT)
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return others if is_ignored else (*others, signal.SIGHUP)
