"""Hogwild: every push counts at once (Niu et al., NIPS 2011; TensorFlow's asynchronous mode)."""

from __future__ import annotations

from zmqtrain.policies.base import Decision, Policy, Release
from zmqtrain.protocol.orders import Apply


class Hogwild(Policy):
    """No worker waits; staleness is measured, not bounded.

    ``whole``: a step counts on every shard or on none, even if its worker dies between its pushes
    to two of them; every push is reported to the leader before it counts anywhere.
    """

    def __init__(self, *, whole: bool = False) -> None:
        self.coordinated = whole
        self.steps: dict[int, int] = {}  # pushes of the live workers, from the least at their join

    @property
    def spec(self) -> str:
        return "hogwild:whole" if self.coordinated else "hogwild"

    def start(self, version: int, workers: int) -> None:
        self.steps.clear()

    def join(self, worker: int) -> list[Decision]:
        self.steps[worker] = min(self.steps.values(), default=0)
        return [Release(worker)]

    def leave(self, worker: int) -> list[Decision]:
        self.steps.pop(worker, None)
        return []

    def push(self, worker: int) -> list[Decision]:
        self.steps[worker] += 1
        return [Apply(worker), Release(worker)]
