"""Epochs when the job goes back to an earlier checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from zmqtrain.callbacks import Callback, LambdaCallback
from zmqtrain.chief.epochs import Epochs
from zmqtrain.chief.evaluator import Evaluator
from zmqtrain.coordination.figures import PassFigures
from zmqtrain.data import Arrays
from zmqtrain.errors import ConfigError, FencedError
from zmqtrain.job import Job
from zmqtrain.models import LinearRegression
from zmqtrain.observe.metrics import Metrics
from zmqtrain.optim import SGD, Exponential


class Host:
    """A host with weights that never change."""

    def __init__(self) -> None:
        self.generation = self.learned_until = 1
        self.written: list[Any] = []
        self.rates: list[float | None] = []
        self.saver: Any = SimpleNamespace(fingerprint={"optimizer": "SGD"})  # it cannot save

    async def status(self) -> Any:
        return SimpleNamespace(policy="hogwild")

    async def read_parameters(self, average: bool = False) -> Any:
        return LinearRegression(2).parameters(0)

    async def begin_with(self, weights: Any) -> None:
        self.written.append(weights)

    async def set_learning_rate(self, rate: float | None) -> None:
        self.rates.append(rate)


def make_epochs(host: Host, *callbacks: Callback, **options: Any) -> Epochs:
    """Return three epochs of two batches."""
    data = Arrays((np.zeros((4, 2), np.float32), np.zeros((4, 1), np.float32)), None)
    job = Job(
        data=data,
        batch_size=2,
        callbacks=callbacks,
        **{"model": LinearRegression(2), "optimizer": SGD(0.1), "epochs": 3} | options,
    )
    evaluator = Evaluator(job, None, Metrics("chief"), host.read_parameters)
    return Epochs(job, 2 if job.epochs else 50, evaluator, host)


async def test_job_that_goes_back_is_evaluated_anew() -> None:
    data = Arrays((np.ones((4, 2), np.float32), np.ones((4, 1), np.float32)), None)
    job = Job(model=LinearRegression(2), data=data, optimizer=SGD(0.1), evaluate_every=10)
    evaluator = Evaluator(job, data.load(None)[0], Metrics("chief"), Host().read_parameters)
    for step in (10, 20, 30):
        assert evaluator.is_due(step) and not evaluator.is_due(step - 1)
        await evaluator.report(step)
    evaluator.forget()
    assert evaluator.is_due(20)
    await evaluator.report(20)
    assert [row["step"] for row in evaluator.evaluations] == [10, 20]


def at(batch: int, learning_rate: float | None = None) -> PassFigures:
    return PassFigures(batch, batch, None, 1.0, 2 * batch, {}, 2.0 * batch, learning_rate)


@pytest.mark.parametrize("last", [3, 2], ids=["all epochs", "stopped by a callback"])
async def test_training_that_has_ended_and_goes_back_is_not_at_its_end(last: int) -> None:
    def stop(epoch: int, logs: Any) -> None:
        stopper.model.stop_training = epoch + 1 == last

    stopper, host = LambdaCallback(on_epoch_end=stop), Host()
    epochs = make_epochs(host, stopper)
    limit = await epochs.begin(at(0))
    while limit is not None:
        limit = await epochs.next_limit(at(limit))
    assert epochs.ended
    assert await epochs.begin(at(2 * last)) is None  # nothing was lost
    host.generation = 2
    assert await epochs.begin(at(2)) == 4
    assert not epochs.ended and epochs.history.epoch == [0]


@pytest.mark.parametrize(("batch", "hooks"), [(0, 2), (2, 1), (3, 0)])
async def test_weights_that_are_set_at_a_begin_do_not_replace_what_was_learned_since(
    batch: int, hooks: int
) -> None:
    def fill(*arguments: Any) -> None:
        filler.model.set_weights([value + 1 for value in filler.model.get_weights()])

    filler, host = LambdaCallback(on_train_begin=fill, on_epoch_begin=fill), Host()
    await make_epochs(host, filler).begin(at(batch))
    assert len(host.written) == hooks


class Unusable(LinearRegression):
    """Writes files without a state, since it cannot use that of the job."""

    suffixes = (".net",)

    def save(self, path: Any, weights: Any, at: Any = None) -> None:
        with pytest.raises(ConfigError, match="hogwild of a job by SGD"):
            at(self.check, pytest.fail)

    def check(self, policy: str, fingerprint: dict[str, str]) -> None:
        raise ConfigError(f"{policy} of a job by {fingerprint['optimizer']}")


async def test_state_that_a_file_cannot_use_is_not_saved() -> None:
    ends: list[str] = []

    def write(*_: Any) -> None:
        writer.model.save("x.net")
        ends.append("written")

    writer, host = LambdaCallback(on_epoch_begin=write), Host()
    await make_epochs(host, writer, model=Unusable(2)).begin(at(0))
    assert ends == ["written"]


@pytest.mark.parametrize("is_ended", [True, False])
async def test_stop_within_an_epoch_holds_where_a_ps_comes_back_and_is_lost_with_its_batches(
    is_ended: bool,
) -> None:
    def stop(batch: int, logs: Any) -> None:
        stopper.model.stop_training = batch == 0

    ends: list[int] = []
    stopper = LambdaCallback(
        on_train_batch_end=stop, on_epoch_end=lambda epoch, logs: ends.append(epoch)
    )
    host = Host()
    epochs = make_epochs(host, stopper)
    await epochs.begin(at(0))
    assert not await epochs.step(at(1))
    if is_ended:
        await epochs.end(at(1))
    assert await epochs.begin(at(1)) is None  # the ps came back with all it had
    await epochs.end(at(1))
    assert ends == [0]
    host.generation = 2  # from a checkpoint in the middle of the epoch
    assert await epochs.begin(at(1)) == 2
    assert not epochs.ended


async def test_callbacks_begin_again_where_a_begin_was_cut_off() -> None:
    class LostHost(Host):
        async def read_parameters(self, average: bool = False) -> Any:
            if self.generation == 2:
                raise FencedError("a ps was restarted")
            return await super().read_parameters(average)

    begins: list[Any] = []
    host = LostHost()
    epochs = make_epochs(host, LambdaCallback(on_train_begin=begins.append))
    await epochs.begin(at(0))
    await epochs.next_limit(at(2))
    host.generation = 2
    with pytest.raises(FencedError):
        await epochs.begin(at(0))  # its record is forgotten
    host.generation = 3
    assert await epochs.begin(at(0)) == 2
    assert len(begins) == 2 and epochs.history.epoch == []


async def test_callback_by_steps_gets_measures_since_its_last_call_and_goes_back_with_the_job() -> (
    None
):
    def note(step: int, logs: Any) -> None:
        assert logs["error"] == pytest.approx(logs["loss"])
        calls.append((step, logs["loss"], round(noter.model.optimizer.learning_rate, 4)))

    def near(batch: int, loss: float) -> PassFigures:
        weight = float(batch**2)  # later batches weigh more
        sums = {"error": loss * weight}
        return replace(at(batch), pass_loss=loss, pass_sums=sums, pass_weight=weight)

    calls: list[Any] = []
    host, noter = Host(), LambdaCallback(every_steps=10, on_steps=note)
    epochs = make_epochs(host, noter, epochs=0, optimizer=SGD(Exponential(0.1, 10, 0.5)))
    assert await epochs.begin(at(0)) == epochs.batches
    for batch, loss in ((9, 4.0), (12, 4.0), (19, 4.0), (24, 3.0)):
        assert await epochs.step(near(batch, loss))
    host.generation = 2  # from the checkpoint of step 12
    await epochs.begin(near(12, 4.0))
    assert await epochs.step(near(21, 4.0))
    expected = [(12, 4, 0.0435), (24, 8 / 3, 0.0189), (21, 4, 0.0233)]
    assert calls == [(step, pytest.approx(loss), rate) for step, loss, rate in expected]


async def test_epoch_whose_new_weights_never_came_to_be_is_no_record(tmp_path: Path) -> None:
    class LostHost(Host):
        async def begin_with(self, weights: Any) -> None:
            raise FencedError("a ps was restarted")

    def fill(epoch: int, logs: Any) -> None:
        filler.model.set_weights([value + 1 for value in filler.model.get_weights()])

    filler, host = LambdaCallback(on_epoch_end=fill), LostHost()
    epochs = make_epochs(host, filler, logdir=str(tmp_path))
    await epochs.begin(at(0))
    with pytest.raises(FencedError):
        await epochs.next_limit(at(2))
    restored, before = Host(), LambdaCallback(on_epoch_end=fill)
    restored.generation = 5  # from a checkpoint of generation 1, at the end of the epoch
    filler = before
    epochs = make_epochs(restored, before, logdir=str(tmp_path))
    assert await epochs.begin(at(2)) == 4
    assert len(restored.written) == 1  # the epoch has ended once more


@pytest.mark.parametrize(
    ("kept", "batch", "optimizer", "rate"),
    [
        (True, 2, SGD(0.1), 0.01),
        (True, 3, SGD(0.1), 0.05),
        (True, 2, SGD(0.2), 0.05),
        (False, 2, SGD(0.1), 0.05),
    ],
    ids=["between epochs", "within an epoch", "optimizer edited", "no logdir"],
)
async def test_new_chief_goes_on_with_the_learning_rate_that_was_set(
    kept: bool, batch: int, optimizer: SGD, rate: float, tmp_path: Path
) -> None:
    def slow(epoch: int, logs: Any) -> None:
        slower.model.optimizer.learning_rate = 0.01

    slower = LambdaCallback(on_epoch_end=slow)
    logdir = {"logdir": str(tmp_path)} if kept else {}
    epochs = make_epochs(Host(), slower, **logdir)
    await epochs.begin(at(0))
    await epochs.next_limit(at(2))
    host = Host()
    await make_epochs(host, optimizer=optimizer, **logdir).begin(at(batch, 0.05))
    assert host.rates == [rate]
