"""Bounded staleness: no worker is more than S steps ahead of the slowest.

The clocks of stale synchronous parallel training (Ho et al., NIPS 2013): a worker's clock is the
number of its pushes, and a worker at clock c goes on while the slowest live worker's clock is at
least c - S. S = 0 is bulk synchronous; without a bound it would be Hogwild.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from zmqtrain.policies.base import Decision, Held, Policy, Release
from zmqtrain.protocol.orders import Apply


class BoundedStaleness(Policy):
    """Apply every push at once; hold its worker while it is more than ``bound`` steps ahead.

    ``unit``: name of a worker's steps in texts for users.
    """

    staleness_bound: int

    def __init__(self, bound: int, unit: str = "steps") -> None:
        self.staleness_bound, self.unit = bound, unit
        self.clocks: dict[int, int] = {}  # live workers; set at join, +1 at every push
        self.at_clock: dict[int, int] = {}  # clock -> number of workers
        self.waiting: set[int] = set()
        self.slowest = 0  # least clock of the live workers; keeps its value when all have left

    @property
    def spec(self) -> str:
        return f"bounded-staleness:{self.staleness_bound}"

    @property
    def steps(self) -> Mapping[int, int]:
        return {w: clock - (w in self.waiting) for w, clock in self.clocks.items()}

    def start(self, version: int, workers: int) -> None:
        self.clocks.clear()
        self.at_clock.clear()
        self.waiting.clear()
        self.slowest = 0

    def join(self, worker: int) -> list[Decision]:
        self._set_clock(worker, self.slowest)
        return [Release(worker)]

    def leave(self, worker: int) -> list[Decision]:
        self._forget_clock(worker)
        self.waiting.discard(worker)
        return self._advance()

    def push(self, worker: int) -> list[Decision]:
        clock = self._forget_clock(worker) + 1
        self._set_clock(worker, clock)
        self.waiting.add(worker)
        released = self._advance()
        if not released and clock <= self.slowest + self.staleness_bound:
            self.waiting.remove(worker)
            released = [Release(worker)]
        return [Apply(worker), *released]

    def held(self) -> Iterable[Held]:
        slowest = tuple(sorted(w for w, clock in self.clocks.items() if clock == self.slowest))
        for worker in sorted(self.waiting):
            ahead = self.clocks[worker] - self.slowest
            reason = f"is {ahead} {self.unit} ahead, the bound is {self.staleness_bound}"
            yield Held(worker, reason, slowest)

    def _advance(self) -> list[Decision]:
        """Release all waiting workers, each a step too far ahead, if the slowest have gone on."""
        before = self.slowest
        while self.clocks and self.slowest not in self.at_clock:
            self.slowest += 1
        if self.slowest == before:
            return []
        released = sorted(self.waiting)
        self.waiting.clear()
        return [Release(worker) for worker in released]

    def _set_clock(self, worker: int, clock: int) -> None:
        self.clocks[worker] = clock
        self.at_clock[clock] = self.at_clock.get(clock, 0) + 1

    def _forget_clock(self, worker: int) -> int:
        clock = self.clocks.pop(worker)
        self.at_clock[clock] -= 1
        if not self.at_clock[clock]:
            del self.at_clock[clock]
        return clock
