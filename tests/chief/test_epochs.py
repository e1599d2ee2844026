"""Epochs when the job goes back to an earlier checkpoint."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from zmqtrain.callbacks import LambdaCallback
from zmqtrain.chief.epochs import Epochs, Progress
from zmqtrain.chief.evaluator import Evaluator
from zmqtrain.data import Arrays
from zmqtrain.job import Job
from zmqtrain.models import LinearRegression
from zmqtrain.observe.metrics import Metrics
from zmqtrain.optim import SGD


class Host:
    """A host with weights that never change."""

    generation = 1

    def __init__(self) -> None:
        self.written: list[Any] = []

    async def read_parameters(self, average: bool = False) -> Any:
        return LinearRegression(2).parameters(0)

    async def write_parameters(self, weights: Any) -> None:
        self.written.append(weights)

    async def set_learning_rate(self, rate: float | None) -> None: ...


@pytest.mark.parametrize("last", [3, 2], ids=["all epochs", "stopped by a callback"])
async def test_training_that_has_ended_and_goes_back_is_not_at_its_end(last: int) -> None:
    def stop(epoch: int, logs: Any) -> None:
        stopper.model.stop_training = epoch + 1 == last

    stopper, host = LambdaCallback(on_epoch_end=stop), Host()
    data = Arrays((np.zeros((4, 2), np.float32), np.zeros((4, 1), np.float32)), None)
    model, sgd = LinearRegression(2), SGD(0.1)
    job = Job(model=model, data=data, optimizer=sgd, batch_size=2, epochs=3, callbacks=[stopper])
    evaluator = Evaluator(job, None, Metrics("chief"), host.read_parameters)
    epochs = Epochs(job, 4, evaluator, host)
    limit = await epochs.begin(Progress(0, 0, 1.0))
    while limit is not None:
        limit = await epochs.next_limit(Progress(limit, limit, 1.0))
    assert epochs.ended
    assert await epochs.begin(Progress(2 * last, 2 * last, 1.0)) is None  # nothing was lost
    assert await epochs.begin(Progress(2, 2, 1.0)) == 4
    assert not epochs.ended and epochs.history.epoch == [0]


@pytest.mark.parametrize(("batch", "hooks"), [(0, 2), (2, 1), (3, 0)])
async def test_weights_that_are_set_at_a_begin_do_not_replace_what_was_learned_since(
    batch: int, hooks: int
) -> None:
    def fill(*arguments: Any) -> None:
        filler.model.set_weights([value + 1 for value in filler.model.get_weights()])

    filler, host = LambdaCallback(on_train_begin=fill, on_epoch_begin=fill), Host()
    data = Arrays((np.zeros((4, 2), np.float32), np.zeros((4, 1), np.float32)), None)
    model, sgd = LinearRegression(2), SGD(0.1)
    job = Job(model=model, data=data, optimizer=sgd, batch_size=2, epochs=3, callbacks=[filler])
    epochs = Epochs(job, 4, Evaluator(job, None, Metrics("chief"), host.read_parameters), host)
    await epochs.begin(Progress(batch, batch, 1.0))
    assert len(host.written) == hooks
