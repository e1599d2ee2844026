"""A clock that a test moves, in place of a module's ``time``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Clock:
    """Stands still unless it is moved."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic

    def time(self) -> float:
        return 1.8e9 + self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def tick(self) -> None:
        """Let a second pass."""
        self.now += 1.0


StopClock = Callable[[Any], Clock]
