"""Bounded staleness: nobody runs more than S steps ahead of the slowest.

The clocks of stale synchronous parallel training (Ho et al., NIPS 2013): a worker's clock is the
number of its pushes, and a worker at clock c goes on while the slowest live worker's clock is at
least c - S. S = 0 is bulk synchronous; without a bound it would be Hogwild.
"""

from __future__ import annotations

from collections.abc import Iterable

from zmqtrain.policies.base import Apply, Decision, Held, Release


class BoundedStaleness:
    """Apply every push at once; hold its worker while it is more than ``bound`` steps ahead."""

    coordinated = True
    step_per_push = True

    def __init__(self, bound: int) -> None:
        self.staleness_bound = bound
        self.clocks: dict[int, int] = {}  # live workers; set at join, +1 at every push
        self.waiting: set[int] = set()
        self.slowest = 0  # least clock of the live workers; keeps its value when all have left

    @property
    def spec(self) -> str:
        return f"bounded-staleness:{self.staleness_bound}"

    def start(self, version: int, workers: int) -> None:
        self.clocks.clear()
        self.waiting.clear()
        self.slowest = 0

    def join(self, worker: int) -> list[Decision]:
        self.clocks[worker] = self.slowest
        return [Release(worker)]

    def leave(self, worker: int) -> list[Decision]:
        self.clocks.pop(worker, None)
        self.waiting.discard(worker)
        return self._advance()

    def push(self, worker: int) -> list[Decision]:
        self.clocks[worker] += 1
        self.waiting.add(worker)
        return [Apply(worker), *self._advance()]

    def drain(self) -> list[Decision]:
        return []

    def held(self) -> Iterable[Held]:
        slowest = tuple(sorted(w for w, clock in self.clocks.items() if clock == self.slowest))
        for worker in sorted(self.waiting):
            ahead = self.clocks[worker] - self.slowest
            yield Held(
                worker, f"is {ahead} steps ahead, the bound is {self.staleness_bound}", slowest
            )

    def _advance(self) -> list[Decision]:
        if self.clocks:
            self.slowest = min(self.clocks.values())
        limit = self.slowest + self.staleness_bound
        free = sorted(worker for worker in self.waiting if self.clocks[worker] <= limit)
        self.waiting.difference_update(free)
        return [Release(worker) for worker in free]
