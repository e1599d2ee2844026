"""TensorFlow's own test of its SyncReplicasOptimizer, number by number, and what differs here.

``sync_replicas_optimizer_test.py``: gradient descent with learning rate 2; worker w pushes 0.1 +
0.2 w for var0, 0.9 + 0.2 w for var1. Its sparse variable is left out: there are no sparse pushes.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zmqtrain.optim import SGD, Update
from zmqtrain.policies import Accumulate, Apply, Decision, Drop, Reduce, Release, make_policy
from zmqtrain.store.layout import Variable
from zmqtrain.store.placement import place
from zmqtrain.store.shard import Shard


class Replicas:
    """Workers that push the test's gradients through a policy into a shard."""

    def __init__(self, spec: str, workers: int) -> None:
        (layout,) = place([Variable("vars", (2,))], 1)
        self.shard = Shard(layout, Update(SGD(2.0)))
        self.shard.initialize(np.array([0, 1], np.float32))
        self.policy = make_policy(spec)
        self.policy.start(0, workers)
        self.computing: set[int] = set()
        self.pushes = self.dropped = self.taken = self.averaged = self.pending = 0
        for worker in range(workers):
            self.carry_out(self.policy.join(worker))

    def run(self, *workers: int) -> None:
        """Have each worker finish one batch, in this order."""
        for worker in workers:
            self.computing.remove(worker)
            self.pushes += 1
            self.pending += 1
            self.shard.segment.gradient(worker)[:] = (0.1 + 0.2 * worker, 0.9 + 0.2 * worker)
            self.shard.stage(worker, worker)
            decisions = self.policy.push(worker)
            self.carry_out(decisions)
            self.taken += sum(isinstance(decision, Release) for decision in decisions)

    def carry_out(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            match decision:
                case Apply() | Accumulate():
                    self.shard.carry_out(decision)
                case Reduce(workers):
                    self.averaged += self.shard.accumulated + len(workers)
                    self.pending -= self.shard.accumulated + len(workers)
                    self.shard.carry_out(decision)
                case Drop():
                    self.dropped += 1
                    self.pending -= 1
                case Release(worker):
                    self.computing.add(worker)

    def check(self, global_step: int, var0: float, var1: float) -> None:
        assert self.shard.version == global_step
        np.testing.assert_allclose(self.shard.parameters, [var0, var1], rtol=1e-6)

    @property
    def local_steps(self) -> dict[int, int]:
        return self.policy.local_step


def test_tokens_of_2_workers_give_the_originals_numbers() -> None:
    replicas = Replicas("sync-replicas:aggregate=2,tokens=2", workers=2)
    replicas.run(0, 1)
    replicas.check(1, -0.4, -1.0)
    assert replicas.local_steps == {0: 0, 1: 0}
    replicas.run(0, 1)
    replicas.check(1, -0.4, -1.0)
    assert replicas.dropped == 2
    assert replicas.local_steps == {0: 1, 1: 1}
    replicas.run(0, 1)
    replicas.check(2, -0.8, -3.0)


def test_tokens_of_3_workers_with_a_backup_give_the_originals_numbers() -> None:
    replicas = Replicas("sync-replicas:aggregate=2,tokens=3", workers=3)
    replicas.run(0, 2)
    replicas.check(1, -0.6, -1.2)
    replicas.run(1)
    replicas.check(1, -0.6, -1.2)
    assert replicas.dropped == 1
    replicas.run(0, 1, 2)
    replicas.check(1, -0.6, -1.2)
    assert replicas.dropped == 4
    assert replicas.local_steps == {0: 1, 1: 1, 2: 1}
    replicas.run(0, 1)
    replicas.check(2, -1.0, -3.2)


@pytest.mark.parametrize(
    "spec", ["sync-replicas:aggregate=4", "sync-replicas:aggregate=4,tokens=2"]
)
def test_mean_of_several_batches_a_worker_divides_by_all_of_them(spec: str) -> None:
    replicas = Replicas(spec, workers=2)
    replicas.run(0, 0, 0, 1)
    replicas.check(1, -2 * (3 * 0.1 + 0.3) / 4, 1 - 2 * (3 * 0.9 + 1.1) / 4)


# A plain list would rarely be longer than ten events.
schedules = st.integers(0, 60).flatmap(
    lambda n: st.lists(st.integers(0, 5), min_size=n, max_size=n)
)


@settings(max_examples=60)
@given(
    workers=st.integers(1, 6),
    aggregate=st.integers(1, 9),
    tokens=st.integers(0, 9),
    schedule=schedules,
)
def test_tokens_and_gradients_are_conserved(
    workers: int, aggregate: int, tokens: int, schedule: list[int]
) -> None:
    replicas = Replicas(f"sync-replicas:aggregate={aggregate},tokens={tokens}", workers)
    for number in schedule:
        if replicas.computing:
            replicas.run(sorted(replicas.computing)[number % len(replicas.computing)])
    policy, steps = replicas.policy, replicas.shard.version
    initial = max(tokens, aggregate - workers)
    assert replicas.pushes == replicas.averaged + replicas.dropped + replicas.pending
    assert replicas.averaged == aggregate * steps
    assert initial + max(workers, aggregate) * steps == replicas.taken + len(policy.tokens)


@settings(max_examples=60)
@given(workers=st.integers(1, 6), backups=st.integers(0, 3), schedule=schedules)
def test_strict_replicas_average_exactly_the_requested_number(
    workers: int, backups: int, schedule: list[int]
) -> None:
    aggregate = max(1, workers - backups)
    replicas = Replicas(f"sync-replicas:aggregate={aggregate}", workers)
    for number in schedule:
        replicas.run(sorted(replicas.computing)[number % len(replicas.computing)])
    assert replicas.pushes == replicas.averaged + replicas.dropped + replicas.pending
    assert replicas.averaged == aggregate * replicas.shard.version
    assert replicas.dropped <= (workers - aggregate) * replicas.shard.version
