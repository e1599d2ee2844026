"""Workers that exchange over the board compute the bits that they compute with messages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import zmqtrain
from zmqtrain import Job
from zmqtrain.data import Arrays
from zmqtrain.models import MLP
from zmqtrain.models.base import Batch, Gradients, Parameters
from zmqtrain.optim import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Exponential,
    Ftrl,
    Lion,
    Momentum,
    RMSProp,
)
from zmqtrain.store import segment_layout as segments
from zmqtrain.store.board import Seat

STEPS = 30
ROWS = 92


def data() -> Arrays:
    chosen = np.random.default_rng(3)
    rows, classes = chosen.normal(size=(ROWS, 6)).astype(np.float32), chosen.integers(0, 3, ROWS)
    return Arrays((rows, classes), (rows, classes))


class Normed(MLP):
    """A model with statistics, and a count of its batches; its gradient of one batch is NaN."""

    wrong = -1  # which batch

    def __init__(self) -> None:
        super().__init__(6, 8, 3)
        self._batch = -1

    def state(self, seed: int) -> dict[str, Any]:
        return {"mean": np.zeros(6, np.float32), "batches": np.zeros((), np.int64)}

    def seed_batch(self, seed: int, number: int) -> None:
        self._batch = number

    def loss_and_gradients(self, parameters: Parameters, batch: Batch, out: Gradients) -> float:
        out["mean"][...] = 0.9 * parameters["mean"] + 0.1 * batch[0].mean(axis=0)
        out["batches"][...] = parameters["batches"] + 1
        loss = super().loss_and_gradients(parameters, batch, out)
        return float("nan") if self._batch == self.wrong else loss


class WrongOnce(Normed):
    wrong = 9


JOBS: dict[str, dict[str, Any]] = {
    "SGD": {"optimizer": SGD(0.1)},
    "Momentum": {"optimizer": Momentum(0.1)},
    "Adagrad": {"optimizer": Adagrad(0.1)},
    "RMSProp": {"optimizer": RMSProp(0.01)},
    "Adam": {"optimizer": Adam(0.01)},
    "AdamW": {"optimizer": AdamW(0.01)},
    "Lion": {"optimizer": Lion(0.01)},
    "Ftrl": {"optimizer": Ftrl(0.1)},
    "a schedule": {"optimizer": SGD(Exponential(0.1, 5, 0.5))},
    "l2 and clipping": {"l2": 0.01, "clip_norm": 0.1},
    "a moving average": {"moving_average": 0.9, "evaluate_average": True},
    "state": {"model": Normed()},
    "a gradient that is not finite": {"model": WrongOnce()},
    "batches far ahead": {"prefetch": 3},
    "evaluations on the way": {"evaluate_every": 4},
    "epochs with short batches": {"epochs": 4},
}


def outcome(workers: int, **fields: Any) -> tuple[Any, ...]:
    """Train, and return what shall not depend on the exchange."""
    defaults = {"model": MLP(6, 8, 3), "optimizer": Adam(0.05), "steps": STEPS, "batch_size": 8}
    job = Job(data=data(), policy="sync-replicas", **defaults | fields)
    summary = zmqtrain.run(job, workers=workers, ps=1)
    assert summary.exit_code == 0
    return (
        summary.parameters_sha256,
        summary.global_step,
        summary.examples,
        summary.pushes,
        summary.measures,
    )


@pytest.mark.parametrize("fields", JOBS.values(), ids=JOBS)
def test_board_gives_the_bits_of_messages(fields: dict[str, Any]) -> None:
    assert outcome(2, exchange="board", **fields) == outcome(2, **fields)


@pytest.mark.parametrize("workers", [1, 3, 4])
def test_board_gives_the_bits_of_messages_to_any_number_of_workers(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_messages = outcome(workers)
    monkeypatch.setattr(segments, "PART_SIZE", 20)  # every worker has something to update
    assert outcome(workers, exchange="board") == by_messages


@pytest.mark.parametrize("model", [MLP(6, 8, 3), Normed()], ids=["trained", "with state"])
def test_messages_are_sent_only_where_the_ps_has_its_say(
    model: MLP, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, end_step = [], Seat.end_step

    def counted(seat: Seat) -> int:
        steps.append(seat.version)
        return end_step(seat)

    monkeypatch.setattr(Seat, "end_step", counted)
    outcome(2, exchange="board", steps=200, model=model)
    assert sorted(steps) == sorted([*range(199)] * 2)
