"""Sync replicas: a step is the mean of R gradients computed on the same parameters.

The rules of TensorFlow's SyncReplicasOptimizer (Chen et al., arXiv:1604.00981), stricter where the
original is known to be weak: a gradient belongs to the step its worker was released into (the
original's tokens are anonymous), one decision holds for all shards, the first batch is not wasted,
and a worker that leaves opens the barrier instead of blocking it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from zmqtrain.policies.base import Decision, Held, Policy, Release
from zmqtrain.protocol.orders import Accumulate, Drop, Reduce


class _Averaging(Policy):
    """A step is the mean of the gradients in hand."""

    step_per_push = False

    def start(self, version: int, workers: int) -> None:
        self.version = version  # +1 at every Reduce
        self.ready: set[int] = set()  # their gradient of this step has arrived
        self.counted = 0  # gradients of this step, accumulated ones included

    def drain(self) -> list[Decision]:
        return self._reduce() if self.counted else []

    def _reduce(self) -> list[Decision]:
        workers = tuple(sorted(self.ready))
        self.ready.clear()
        self.counted = 0
        self.version += 1
        return [Reduce(workers)]


class Replicas(_Averaging):
    """Average ``aggregate`` gradients a step; None means one from every live worker.

    With fewer than the number of workers the others are backups, whose late gradients are dropped.
    With more, workers that finish early compute further batches of the same step.
    """

    staleness_bound = 0
    aggregate: int | None = None
    _each = "gradients"

    def start(self, version: int, workers: int) -> None:
        super().start(version, workers)
        self.expected = workers  # number that the first step waits for
        self.begun = False  # set once they have all joined
        self.computing: dict[int, int] = {}  # worker -> version it was released at
        self.waiting: set[int] = set()  # live, not computing
        # Gradients of this step, counted or on their way: +1 at a release, -1 if that worker leaves
        # instead of pushing. A worker still at an earlier step is not one: its push will be stale.
        self.hands = 0

    def join(self, worker: int) -> list[Decision]:
        self.waiting.add(worker)
        if not self.begun:
            self.begun = len(self.waiting) >= self.expected
            return self._begin() if self.begun else []
        return self._settle()  # it joins a step under way only if that lacks hands

    def leave(self, worker: int) -> list[Decision]:
        member = self.computing.pop(worker, None)
        self.waiting.discard(worker)
        if member == self.version:
            self.hands -= 1
        return self._settle() if self.begun else []

    def push(self, worker: int) -> list[Decision]:
        version = self.computing.pop(worker)
        self.waiting.add(worker)
        if version < self.version:
            return [Drop(worker, "stale"), *self._release(worker)]
        self.ready.add(worker)
        self.counted += 1
        return self._settle()

    def held(self) -> Iterable[Held]:
        if not self.begun:
            reason = f"{len(self.waiting)} of {self.expected} workers have joined"
            missing = tuple(w for w in range(self.expected) if w not in self.waiting)
            return [Held(worker, reason, missing) for worker in sorted(self.waiting)]
        by = tuple(sorted(w for w, version in self.computing.items() if version == self.version))
        reason = f"{self._step} has {self.counted} of {self._needed()} {self._each}"
        return [Held(worker, reason, by) for worker in sorted(self.waiting)]

    @property
    def steps(self) -> Mapping[int, int]:
        return dict.fromkeys(self.waiting, self.version) | self.computing

    @property
    def _step(self) -> str:
        return f"step {self.version}"

    def _needed(self) -> int:
        return self.aggregate or max(1, self.hands)

    def _settle(self) -> list[Decision]:
        """End the step if it is complete, else release workers that it still needs."""
        if self.counted and self.counted >= self._needed():
            return [*self._reduce(), *self._begin()]
        if not self.hands:
            return self._begin()
        return self._fill()

    def _begin(self) -> list[Decision]:
        """Release all waiting workers into the step at ``version``."""
        self.hands = 0
        decisions: list[Decision] = []
        for worker in sorted(self.waiting):
            decisions += self._release(worker)
        return decisions

    def _fill(self) -> list[Decision]:
        """Release more workers into this step while too few gradients are on their way."""
        decisions: list[Decision] = []
        if self.hands >= self._needed():
            return decisions
        for worker in sorted(self.waiting, key=lambda w: (w in self.ready, w)):
            if self.hands >= self._needed():
                break
            if worker in self.ready:  # its next gradient takes the place of this one
                self.ready.discard(worker)
                decisions.append(Accumulate(worker))
            decisions += self._release(worker)
        return decisions

    def _release(self, worker: int) -> list[Decision]:
        self.waiting.discard(worker)
        self.computing[worker] = self.version
        self.hands += 1
        return [Release(worker)]


class SyncReplicas(Replicas):
    """The mean of gradients. Workers may make the steps among themselves."""

    def __init__(self, aggregate: int | None = None) -> None:
        self.aggregate = aggregate
        self.start(0, 0)

    @property
    def spec(self) -> str:
        return "sync-replicas" + (f":aggregate={self.aggregate}" if self.aggregate else "")

    @property
    def is_level(self) -> bool:
        count = len(self.computing)
        all_in = set(self.computing.values()) == {self.version} and not self.waiting
        return all_in and not self.counted and self._needed() == self.hands == count

    def advance(self, steps: int) -> None:
        self.version += steps
        self.computing = dict.fromkeys(self.computing, self.version)


class TokenSyncReplicas(_Averaging):
    """The original's token queue, for parity: anonymous first-in-first-out tokens.

    The ``tokens`` initial tokens carry the starting step, so the first gradients computed with them
    are wasted; a later token has the step of its taker's next gradient. A dead worker's token is
    lost. A step gives out a token for each worker, at least R, and needs R of them. Once too many
    are lost (any, without backup workers), all workers wait forever, as in TensorFlow, but not
    with :class:`SyncReplicas`.
    """

    def __init__(self, aggregate: int, tokens: int) -> None:
        self.aggregate = aggregate
        self.initial_tokens = tokens
        self.start(0, 0)

    @property
    def spec(self) -> str:
        return f"sync-replicas:aggregate={self.aggregate},tokens={self.initial_tokens}"

    def start(self, version: int, workers: int) -> None:
        super().start(version, workers)
        self.tokens_per_step = max(workers, self.aggregate)
        # Fewer than R - T would never end the first step; the original refuses such a number.
        self.tokens = deque([version] * max(self.initial_tokens, self.aggregate - workers))
        self.local_step: dict[int, int] = {}  # live workers; the last token taken
        self.takers: deque[int] = deque()  # waiting for a token, in order
        self.taken = 0  # tokens

    @property
    def steps(self) -> Mapping[int, int]:
        return self.local_step

    def join(self, worker: int) -> list[Decision]:
        self.local_step[worker] = self.version
        return self._release(worker)

    def leave(self, worker: int) -> list[Decision]:
        self.local_step.pop(worker, None)
        if worker in self.takers:
            self.takers.remove(worker)
        return []

    def push(self, worker: int) -> list[Decision]:
        decisions: list[Decision] = []
        if self.local_step[worker] < self.version:
            decisions.append(Drop(worker, "stale"))
        else:
            self.ready.add(worker)
            self.counted += 1
        if self.counted >= self.aggregate:
            decisions += self._reduce()
            self.tokens.extend([self.version] * self.tokens_per_step)
        self.takers.append(worker)
        while self.tokens and self.takers:
            decisions += self._take_token()
        return decisions

    def held(self) -> Iterable[Held]:
        computing = tuple(sorted(set(self.local_step) - set(self.takers)))
        reason = f"waits for a token; step {self.version} has {self.counted} of {self.aggregate}"
        return [Held(worker, reason, computing) for worker in self.takers]

    def _take_token(self) -> list[Decision]:
        worker = self.takers.popleft()
        self.local_step[worker] = self.tokens.popleft()
        self.taken += 1
        return self._release(worker)

    def _release(self, worker: int) -> list[Decision]:
        if worker not in self.ready:
            return [Release(worker)]
        self.ready.discard(worker)  # its next gradient takes the place of this one
        return [Accumulate(worker), Release(worker)]
