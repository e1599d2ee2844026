"""Local steps: workers train by themselves for H batches, then agree on common parameters.

The rounds of local SGD (Stich, arXiv:1805.09767) and DiLoCo (Douillard et al., arXiv:2311.08105).
A round ends when every live worker has sent its result, so a worker that leaves opens it. Without
rounds, each result counts when it arrives (Liu et al., arXiv:2401.09135).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from zmqtrain.policies.base import Decision, Held, Release
from zmqtrain.policies.bounded_staleness import BoundedStaleness
from zmqtrain.policies.sync_replicas import Replicas

MAX_BATCHES = 1000
"""Most batches of a round: messages, and the memory of a ps, hold the number of each."""

BOUND = 4
"""Most rounds that a worker is ahead of the slowest one, unless the policy names another number."""


class LocalSteps(Replicas):
    """Rounds of ``batches`` steps that each worker makes alone; before step ``after`` there are
    none, and each step is the mean of the workers' gradients, as under sync-replicas.
    """

    _each = "results"
    _step = "this round"

    def __init__(self, batches: int, after: int = 0) -> None:
        self.batches = self.most_local_steps = batches
        self.after = after
        self.start(0, 0)

    @property
    def spec(self) -> str:
        return f"local-steps:{self.batches}" + (f",after={self.after}" if self.after else "")

    def local_steps(self, step: int) -> int:
        return self.batches if step >= self.after else 0


class AsyncLocalSteps(LocalSteps):
    """Local steps of which each result counts when it arrives; a step is a batch of one worker.

    A worker that is more than ``bound`` of its rounds ahead of the slowest live one waits for it.
    """

    at_arrival = True

    def __init__(self, batches: int, after: int = 0, bound: int = BOUND) -> None:
        self.bound, self.staleness_bound = bound, bound * batches
        self.clocks = BoundedStaleness(bound, "rounds")
        super().__init__(batches, after)

    @property
    def spec(self) -> str:
        return f"{super().spec},async" + (f",bound={self.bound}" if self.bound != BOUND else "")

    @property
    def _is_clocked(self) -> bool:
        return self.version >= self.after

    def start(self, version: int, workers: int) -> None:
        super().start(version, workers)
        self.clocks.start(version, workers)

    def join(self, worker: int) -> list[Decision]:
        return self.clocks.join(worker) if self._is_clocked else super().join(worker)

    def leave(self, worker: int) -> list[Decision]:
        if self._is_clocked:
            return self.clocks.leave(worker)
        return self._clocked(super().leave(worker))

    def push(self, worker: int) -> list[Decision]:
        return self.clocks.push(worker) if self._is_clocked else self._clocked(super().push(worker))

    def held(self) -> Iterable[Held]:
        return self.clocks.held() if self._is_clocked else super().held()

    @property
    def steps(self) -> Mapping[int, int]:
        return self.clocks.steps if self._is_clocked else super().steps

    def _clocked(self, decisions: list[Decision]) -> list[Decision]:
        """Count the rounds of workers that go on after the last step of gradients."""
        for decision in decisions if self._is_clocked else ():
            if isinstance(decision, Release):
                self.clocks.join(decision.worker)
        return decisions
