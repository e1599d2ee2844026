"""A clock that a test moves, in place of a module's ``time``."""

from __future__ import annotations


class Clock:
    """Stands still unless it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic

    def tick(self) -> None:
        """Let a second pass."""
        self.now += 1.0
