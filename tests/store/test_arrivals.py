"""Results of local steps that a shard applies one by one, compared with the paper's algorithm."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from zmqtrain.optim import SGD, Adam, Momentum, Update
from zmqtrain.optim.outer import CLOSES, OPENS, Outer
from zmqtrain.protocol.orders import Apply, Reduce
from zmqtrain.protocol.status import Moves
from zmqtrain.store.layout import Variable
from zmqtrain.store.placement import place
from zmqtrain.store.shard import Shard

TRAINED = 5
(LAYOUT,) = place(
    [Variable("w", (TRAINED,)), Variable("mean", (2,), "float32", "state")], 1, partition_nbytes=0
)
RATE, BETA = 0.7, 0.9
AROUND = slice(0, TRAINED)


def shard_by(rule: Any, *, of_differences: bool = False) -> Shard:
    shard = Shard(LAYOUT, Update(Adam(0.1), outer=Outer(rule, of_differences=of_differences)))
    shard.initialize(np.linspace(-1, 1, LAYOUT.size, dtype=np.float32))
    return shard


def push(shard: Shard, worker: int, difference: Any) -> None:
    result = shard.segment.gradient(worker)
    result[AROUND], result[LAYOUT.trained :] = difference, worker
    shard.stage(worker, worker, weight=worker + 0.5)  # by which a mean of one is divided again


def delayed_nesterov(w: Any, differences: Any, workers: int) -> Any:
    """Return what algorithm 3 of arXiv:2401.09135 with c = 0 makes of w."""
    momentum, gathered = np.zeros(TRAINED), np.zeros(TRAINED)
    for t, difference in enumerate(differences):
        g = -difference
        gathered = gathered + g
        if (t + 1) % workers == 0:
            momentum = BETA * momentum + gathered / workers
            w = w - RATE * (BETA * momentum + g / workers)
            gathered = np.zeros(TRAINED)
        else:
            w = w - RATE * g / workers
    return w


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("scaled_velocity", [False, True])
def test_momentum_is_delayed_as_in_the_paper(workers: int, scaled_velocity: bool) -> None:
    rule = Momentum(RATE, BETA, nesterov=True, scaled_velocity=scaled_velocity)
    shard = shard_by(rule)
    begin = shard.parameters[AROUND].astype(np.float64)
    differences = np.random.default_rng(0).standard_normal((4 * workers, TRAINED))
    for number, difference in enumerate(differences):
        place = number % workers
        cycle = OPENS * (place == 0) | CLOSES * (place == workers - 1)
        push(shard, place, difference)
        shard.carry_out(Apply(place, None, 5, among=workers, cycle=cycle))
    expected = delayed_nesterov(begin, differences, workers)
    np.testing.assert_allclose(shard.parameters[AROUND], expected, rtol=1e-5, atol=1e-6)
    assert shard.version == 5 * len(differences)
    assert (shard.parameters[LAYOUT.trained :] == workers - 1).all()  # state is the last one's


@pytest.mark.parametrize("rule", [None, SGD(0.5), Momentum(RATE, BETA, nesterov=True)], ids=str)
@pytest.mark.parametrize("workers", [1, 3])
def test_cycle_of_results_moves_as_a_round_of_them(rule: Any, workers: int) -> None:
    alone, together = shard_by(rule), shard_by(rule, of_differences=True)
    random = np.random.default_rng(1)
    for _ in range(3):
        for worker in range(workers):
            moved = random.standard_normal(TRAINED)
            for shard in (alone, together):
                push(shard, worker, moved)
                shard.stage(worker, worker)
            cycle = OPENS * (worker == 0) | CLOSES * (worker == workers - 1)
            alone.carry_out(Apply(worker, None, 2, among=workers, cycle=cycle))
        together.carry_out(Reduce(tuple(range(workers)), local_steps=2 * workers))
    found, expected = alone.parameters[AROUND], together.parameters[AROUND]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert alone.version == together.version
    assert alone.moves == Moves()
    assert alone.dense.missed == together.dense.missed == {"w": 6 * workers}
