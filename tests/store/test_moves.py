"""Similarity of the workers' moves of the parameters in a round."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from zmqtrain.optim import SGD, Update
from zmqtrain.optim.outer import Outer
from zmqtrain.protocol.orders import Reduce
from zmqtrain.protocol.status import Moves, agreement_of
from zmqtrain.store.layout import Variable
from zmqtrain.store.placement import place
from zmqtrain.store.shard import Shard

VARIABLES = [Variable("w", (3,)), Variable("mean", (2,), "float32", "state")]
(LAYOUT,) = place(VARIABLES, 1, partition_nbytes=0)


def agreement(moves: list[Any], *, of_differences: bool, weights: tuple[float, ...]) -> float:
    """Return the agreement of a round in which workers make these moves."""
    shard = Shard(LAYOUT, Update(SGD(0.1), outer=Outer(of_differences=of_differences)))
    shard.initialize(np.full(LAYOUT.size, 0.5, np.float32))
    for worker, (moved, weight) in enumerate(zip(moves, weights, strict=True)):
        result = shard.segment.gradient(worker)
        result[:] = 99  # of the state, too
        result[:3] = moved if of_differences else np.add(0.5, moved)
        shard.stage(worker, worker, weight=weight)
    shard.carry_out(Reduce(tuple(range(len(moves))), local_steps=5))
    return agreement_of([shard.moves])


@pytest.mark.parametrize("of_differences", [False, True])
@pytest.mark.parametrize(
    ("moves", "weights", "expected"),
    [
        ([[1, 2, 0], [1, 2, 0]], (1, 3), 1.0),
        ([[1, 0, 0], [0, 1, 0]], (1, 1), 0.5**0.5),
        ([[1, 0, 0], [-1, 0, 0]], (2, 2), 0.0),
        ([[4, 0, 0], [0, 4, 0]], (3, 1), (9 + 1) ** 0.5 / 4),
    ],
    ids=["alike", "unrelated", "opposite", "weighted"],
)
def test_agreement_is_the_norm_of_the_mean_by_that_of_each(
    moves: list[Any], weights: tuple[float, ...], expected: float, of_differences: bool
) -> None:
    found = agreement(moves, of_differences=of_differences, weights=weights)
    assert found == pytest.approx(expected, abs=1e-6)


def test_agreement_of_shards_is_that_of_the_whole_model() -> None:
    assert agreement_of([Moves(1.0, 1.0), Moves(0.0, 3.0)]) == 0.5
    assert np.isnan(agreement_of([Moves()]))
