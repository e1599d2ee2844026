"""Hogwild: every push counts at once (Niu et al., NIPS 2011; TensorFlow's asynchronous mode)."""

from __future__ import annotations

from collections.abc import Iterable

from zmqtrain.policies.base import Apply, Decision, Held, Release


class Hogwild:
    """Nobody waits for anybody; staleness is measured, not bounded."""

    spec = "hogwild"
    coordinated = False
    step_per_push = True
    staleness_bound = None

    def start(self, version: int, workers: int) -> None:
        """Keep no state."""

    def join(self, worker: int) -> list[Decision]:
        return [Release(worker)]

    def leave(self, worker: int) -> list[Decision]:
        return []

    def push(self, worker: int) -> list[Decision]:
        return [Apply(worker), Release(worker)]

    def drain(self) -> list[Decision]:
        return []

    def held(self) -> Iterable[Held]:
        return ()
