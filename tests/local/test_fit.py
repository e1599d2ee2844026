"""`Trainer.fit` in one process, compared with a loop of NumPy."""

from __future__ import annotations

import math
import re
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zmqtrain
from zmqtrain import Trainer
from zmqtrain.callbacks import (
    Callback,
    EarlyStopping,
    LambdaCallback,
    LearningRateScheduler,
    ModelCheckpoint,
    ReduceLROnPlateau,
)
from zmqtrain.data import ArrayDataset, Arrays, BatchPlan, Holdout, NoisyLine, Stream
from zmqtrain.errors import CheckpointError, ConfigError, DataError, RunFailedError
from zmqtrain.metrics import AUC, Accuracy, MeanAbsoluteError
from zmqtrain.models import MLP, LinearRegression, measured
from zmqtrain.optim import SGD, Exponential, Momentum

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(23, 2)).astype(np.float32)
Y = (X @ np.array([[2.0], [-1.0]], np.float32)) + 0.5
TRAIN, VALIDATION = (X[:17], Y[:17]), (X[17:], Y[17:])
MODEL = LinearRegression(2)


class Watched(ArrayDataset):
    """Remembers the examples of each batch."""

    __slots__ = ("batches",)

    def __init__(self, *arrays: Any) -> None:
        super().__init__(*arrays)
        self.batches: list[list[int]] = []

    def take(self, indices: Any) -> Any:
        self.batches.append(indices.tolist())
        return super().take(indices)


def reference(seed: int, rates: list[float]) -> tuple[dict[str, Any], list[float]]:
    """Train on one batch with each of these rates; return the weights and each batch's loss."""
    plan = BatchPlan(17, 5, seed, exact=True)
    weights, losses = MODEL.parameters(0), []
    for number, rate in enumerate(rates):
        batch = plan.indices(number)
        out = {name: np.empty_like(value) for name, value in weights.items()}
        losses.append(MODEL.loss_and_gradients(weights, (X[batch], Y[batch]), out))
        for name, value in weights.items():
            value -= np.float32(rate) * out[name]
    return weights, losses


def assert_same(weights: Any, expected: Any) -> None:
    for name, value in expected.items():
        assert np.array_equal(weights[name], value), name


def fit(trainer: Trainer, x: Any = TRAIN, **options: Any) -> zmqtrain.History:
    given = {"batch_size": 5, "verbose": False, "validation_data": VALIDATION} | options
    return trainer.fit(x, **given)


def test_epochs_are_exact_passes_and_history_is_that_of_a_plain_loop() -> None:
    train = Watched(*TRAIN)
    trainer = Trainer(MODEL, SGD(0.05), seed=3)
    history = fit(trainer, train, epochs=3)
    assert sorted(map(len, train.batches)) == [2] * 3 + [5] * 9
    for epoch in range(3):
        seen = [example for batch in train.batches[4 * epoch : 4 * epoch + 4] for example in batch]
        assert sorted(seen) == list(range(17))
    weights, losses = reference(3, [0.05] * 12)
    assert_same(trainer.weights, weights)
    means = [np.average(losses[i : i + 4], weights=[5, 5, 5, 2]) for i in (0, 4, 8)]
    assert history.history["loss"] == pytest.approx(means)
    assert history.history["val_loss"][-1] == trainer.evaluate(VALIDATION)["loss"]
    assert history.epoch == [0, 1, 2]


@pytest.mark.parametrize("workers", [1, 2])
def test_epochs_of_a_number_of_steps_cut_the_passes_of_arrays_and_of_streams(workers: int) -> None:
    train, rows = Watched(*TRAIN), [5, 5, 5, 2, 5, 5, 5, 2, 5]  # of batches
    trainer = Trainer(MODEL, SGD(0.05), policy="sync-replicas", workers=workers)
    losses_of: dict[int, float] = {}
    tested: list[int] = []
    noted = LambdaCallback(
        every_steps=2,
        on_steps=lambda step, logs: losses_of.update({step: logs["loss"]}),
        on_test_end=lambda logs: tested.append(noted.model.step),
    )
    history = fit(trainer, train, epochs=3, steps_per_epoch=3, callbacks=[noted])
    assert sorted(map(len, train.batches)) == sorted(rows)
    _, losses = reference(0, [0.05] * 9)
    means = [np.average(losses[i : i + 3], weights=rows[i : i + 3]) for i in (0, 3, 6)]
    if workers == 1:
        assert history.history["loss"] == pytest.approx(means)
        by_two = {2: np.mean(losses[:2]), 4: losses[3], 6: np.mean(losses[4:6]),
                  8: np.average(losses[6:8], weights=[5, 2])}  # fmt: skip
        assert losses_of == pytest.approx(by_two) and tested == [3, 6, 9]
    assert history.epoch == [0, 1, 2] and history.params["steps"] == 3
    endless = Stream(["part"], lambda _: zip(*TRAIN, strict=True))
    assert len(fit(trainer, endless, epochs=2, steps_per_epoch=4).epoch) == 2


class Count:
    """A metric that counts the examples."""

    name = "count"

    def update(self, outputs: Any, batch: Any) -> Any:
        return np.array([len(outputs)], np.float64)

    def result(self, sums: Any) -> float:
        return float(sums[0])


def right_answers(model: Any, batches: int, workers: int) -> int:
    """Return how many labels are right before their batch's update, in one epoch of SGD."""
    plan, right = BatchPlan(len(LABELS), 5, 0, exact=True), 0
    weights = model.parameters(0)
    for first in range(0, batches, workers):
        total = {name: np.zeros_like(value) for name, value in weights.items()}
        rows = [plan.indices(number) for number in range(first, min(first + workers, batches))]
        for batch in rows:
            x, y = FEATURES[batch], LABELS[batch]
            out = {name: np.empty_like(value) for name, value in weights.items()}
            model.loss_and_gradients(weights, (x, y), out)
            right += np.sum(model.predict(weights, (x,)).argmax(axis=1) == y)
            for name, value in out.items():
                total[name] += value * len(batch)
        for name, value in weights.items():
            value -= np.float32(0.05) * total[name] / sum(map(len, rows))
    return int(right)


FEATURES = RANDOM.normal(size=(203, 2)).astype(np.float32)
LABELS = (FEATURES[:, 0] > 0).astype(np.int64) + (FEATURES[:, 1] > 0)


@pytest.mark.parametrize(
    ("workers", "options"),
    [
        (1, {}),
        (2, {"workers": 2, "ps": 1}),
        (2, {"workers": 2, "ps": 2, "partition_nbytes": 4}),
        (2, {"workers": 2, "ps": 0}),
        (2, {"devices": ["cpu:0", "cpu:1"]}),
    ],
    ids=["local", "ps", "two-ps", "board", "devices"],
)
def test_history_has_what_each_batch_measured_before_its_update(
    workers: int, options: dict[str, Any]
) -> None:
    seen: list[Any] = []

    def look(epoch: int, logs: Any) -> None:
        seen.append(callback.model.status)

    callback = LambdaCallback(on_epoch_end=look)
    policy = {"policy": "sync-replicas"} if "workers" in options else {}
    model = MLP(2, (), 3)
    trainer = Trainer(model, SGD(0.05), metrics=[Accuracy(name="share")], **options, **policy)
    data = FEATURES, LABELS
    history = fit(trainer, data, validation_data=data, callbacks=[callback]).history
    expected = right_answers(model, 41, workers) / 203
    assert history["share"] == [expected]
    assert history["accuracy"] == [pytest.approx(expected)]
    assert list(history) == ["loss", "accuracy", "share", "val_loss", "val_accuracy", "val_share"]
    if options.get("ps") == 0:
        assert seen[0].rosters > 0


def test_what_has_too_many_sums_is_measured_in_evaluations_alone() -> None:
    data = X, (Y[:, 0] > 0).astype(np.int64)
    trainer = Trainer(Score(2), SGD(0.05), metrics=[AUC(), Accuracy(name="share")])
    history = fit(trainer, data, validation_data=data).history
    assert {"share", "val_share", "val_auc"} <= set(history)
    with pytest.raises(KeyError, match="'auc' was not measured; there are loss, half, share, val"):
        history["auc"]
    with pytest.raises(
        RunFailedError, match=r"names 'auc', which is not measured.*did you mean val_auc"
    ):
        fit(trainer, data, validation_data=data, callbacks=[EarlyStopping("auc")])
    fit(trainer, data, validation_data=data, callbacks=[EarlyStopping("half", mode="max")])
    with pytest.raises(ConfigError, match="there are loss"):
        fit(trainer, data, validation_data=None, callbacks=[EarlyStopping("val_share")])
    fit(trainer, data, validation_data=None, callbacks=[EarlyStopping("share")])


class Score(LinearRegression):
    """A model whose outputs are from 0 to 1."""

    def predict(self, parameters: Any, batch: Any) -> Any:
        return np.clip(super().predict(parameters, batch), 0, 1)

    def loss_and_gradients(self, parameters: Any, batch: Any, out: Any) -> float:
        outputs = self.predict(parameters, batch)
        measured(out, len(batch[0]), {"half": 0.5}, lambda: (outputs, batch))
        return super().loss_and_gradients(parameters, batch, dict(out))


class Recorder:
    """A callback as people write them for Keras, without its base class."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def set_params(self, params: dict[str, Any]) -> None:
        self.calls.append(("params", params["epochs"], params["steps"]))

    def set_model(self, model: Any) -> None:
        self.model = model

    def on_train_begin(self, logs: Any = None) -> None:
        self.calls.append("train")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.calls.append(("epoch", epoch))

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.calls.append(("batch", batch))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        assert np.isfinite(logs["loss"])
        self.calls.append(("batch end", batch))

    def on_test_begin(self, logs: Any = None) -> None:
        self.calls.append("test")

    def on_test_end(self, logs: Any = None) -> None:
        self.calls.append(("test end", sorted(logs)))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.calls.append(("epoch end", epoch, sorted(logs)))
        assert [value.shape for value in self.model.get_weights()] == [(2, 1), (1,)]
        if epoch == 1:
            self.model.stop_training = True

    def on_train_end(self, logs: Any = None) -> None:
        self.calls.append("train end")


def test_callback_written_for_keras_is_called_as_keras_would() -> None:
    recorder = Recorder()
    trainer = Trainer(MODEL, SGD(0.05), metrics=[MeanAbsoluteError()])
    history = fit(trainer, epochs=9, batch_size=10, callbacks=[recorder])
    measures = ["loss", "mean_absolute_error"]

    def epoch(number: int) -> list[Any]:
        return [
            *(("epoch", number), ("batch", 0), ("batch end", 0), ("batch", 1), ("batch end", 1)),
            *("test", ("test end", measures)),
            ("epoch end", number, [*measures, *(f"val_{name}" for name in measures)]),
        ]

    assert recorder.calls == [("params", 9, 2), "train", *epoch(0), *epoch(1), "train end"]
    assert history.epoch == [0, 1]
    assert trainer.summary is not None and trainer.summary.exit_code == 0


def test_learning_rate_that_is_set_counts_exactly() -> None:
    trainer = Trainer(MODEL, SGD(0.08))
    history = fit(
        trainer, epochs=3, callbacks=[LearningRateScheduler(lambda epoch, rate: rate / 2)]
    )
    rates = [rate for rate in (0.04, 0.02, 0.01) for _ in range(4)]
    weights, _ = reference(0, rates)
    assert_same(trainer.weights, weights)
    assert history.history["learning_rate"] == [0.04, 0.02, 0.01]


def test_best_weights_are_restored_and_saved(tmp_path: Path) -> None:
    seen = {}

    def remember(epoch: int, logs: Any) -> None:
        seen[epoch] = logs["val_loss"]

    def spoil(epoch: int, logs: Any) -> None:
        if epoch == 2:
            early.model.set_weights([value + 1 for value in early.model.get_weights()])

    early = EarlyStopping(patience=2, restore_best=True)
    callbacks = [
        LambdaCallback(on_epoch_end=remember),
        early,
        ModelCheckpoint(tmp_path / "best.npz", save_best_only=True),
        LambdaCallback(on_epoch_end=spoil),
    ]
    trainer = Trainer(MODEL, SGD(0.05), logdir=tmp_path / "run")
    history = fit(trainer, epochs=20, callbacks=callbacks)
    assert early.best_epoch == 2 and len(history.epoch) == 5  # what was spoilt was measured
    assert trainer.evaluate(VALIDATION)["loss"] == seen[2]
    best = np.load(tmp_path / "best.npz")
    for name, value in trainer.weights.items():
        assert np.array_equal(best[name], value)
        assert not np.array_equal(zmqtrain.load(tmp_path / "run")[name], value)  # the last ones


@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_fit_that_is_resumed_is_the_fit_that_was_not_interrupted(
    tmp_path: Path, epochs: int
) -> None:
    def callbacks() -> list[Any]:
        return [
            ReduceLROnPlateau(patience=1, min_delta=10, factor=0.5),
            EarlyStopping(patience=4, min_delta=10),
        ]

    whole = Trainer(MODEL, Momentum(0.05, 0.9))
    expected = fit(whole, epochs=7, callbacks=callbacks())
    again = Trainer(MODEL, Momentum(0.05, 0.9), logdir=tmp_path)
    fit(again, epochs=epochs, callbacks=callbacks())
    history = fit(again, epochs=7, callbacks=callbacks())
    assert history.rows() == expected.rows()
    assert len(history.epoch) == 5
    assert_same(again.weights, whole.weights)
    newcomer = Trainer(MODEL, Momentum(0.05, 0.9), logdir=tmp_path)
    assert newcomer.evaluate(VALIDATION) == again.evaluate(VALIDATION)


@pytest.mark.parametrize("last", [1, 3], ids=["within an epoch", "at its end"])
def test_fit_that_was_interrupted_goes_on_there(last: int, tmp_path: Path) -> None:
    def interrupt(batch: int, logs: Any) -> None:
        if batch == last:
            signal.raise_signal(signal.SIGINT)

    metrics = [MeanAbsoluteError()]
    expected = fit(whole := Trainer(MODEL, SGD(0.05), metrics=metrics), epochs=2)
    trainer = Trainer(MODEL, SGD(0.05), metrics=metrics, logdir=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        fit(trainer, epochs=2, callbacks=[LambdaCallback(on_train_batch_end=interrupt)])
    assert trainer.summary is not None and 0 < trainer.summary.global_step < 8
    history = fit(trainer, epochs=2)
    assert history.rows() == expected.rows()
    assert_same(trainer.weights, whole.weights)


@pytest.mark.parametrize("ends", [True, False], ids=["after an epoch", "within the first"])
@pytest.mark.parametrize("size", [{}, {"workers": 2, "ps": 1}], ids=["alone", "cluster"])
def test_fit_whose_epochs_have_another_length_is_not_resumed(
    tmp_path: Path, ends: bool, size: dict[str, Any]
) -> None:
    def interrupt(batch: int, logs: Any) -> None:
        if not ends:
            signal.raise_signal(signal.SIGINT)

    trainer = Trainer(MODEL, SGD(0.05), logdir=tmp_path, **size)
    with suppress(KeyboardInterrupt):
        fit(trainer, epochs=2, callbacks=[LambdaCallback(on_train_batch_end=interrupt)])
    saved = zmqtrain.load(tmp_path)
    refused = ConfigError, RunFailedError
    text = r"(had|ends at batch) 4.*, and now an epoch has 2; .*another logdir"
    with pytest.raises(refused, match=text):
        fit(trainer, epochs=3, steps_per_epoch=2)
    assert_same(zmqtrain.load(tmp_path), saved)


@pytest.mark.parametrize("size", [{}, {"workers": 2, "ps": 1}], ids=["alone", "cluster"])
def test_epochs_begin_anew_with_data_of_another_length(
    tmp_path: Path, size: dict[str, Any]
) -> None:
    trainer = Trainer(MODEL, SGD(0.05), logdir=tmp_path, **size)
    fit(trainer, epochs=2)
    fewer = TRAIN[0][:10], TRAIN[1][:10]
    assert fit(trainer, fewer, epochs=3).epoch == [0, 1, 2]
    assert fit(trainer, fewer, epochs=4).epoch == [0, 1, 2, 3]


@pytest.mark.parametrize("ending", ["interrupted", "ended"])
def test_best_weights_are_a_result_and_a_resumed_job_goes_on_from_the_last(
    tmp_path: Path, ending: str
) -> None:
    def choose(logs: Any = None) -> None:
        model = chooser.model
        model.set_weights([value + 1 for value in model.get_weights()])

    def interrupt(epoch: int, logs: Any = None) -> None:
        if ending == "interrupted" and epoch == 1:
            signal.raise_signal(signal.SIGINT)

    chooser = LambdaCallback(on_train_end=choose, on_epoch_begin=interrupt)
    expected = fit(whole := Trainer(MODEL, Momentum(0.05, 0.9)), epochs=3)
    trainer = Trainer(MODEL, Momentum(0.05, 0.9), logdir=tmp_path)
    if ending == "interrupted":
        with pytest.raises(KeyboardInterrupt):
            fit(trainer, epochs=3, callbacks=[chooser])
        assert np.array_equal(trainer.weights["weights"], zmqtrain.load(tmp_path)["weights"])
    else:
        fit(trainer, epochs=2, callbacks=[chooser])
        last = zmqtrain.load(tmp_path)["weights"]
        assert np.array_equal(trainer.weights["weights"], last + 1)
    assert fit(trainer, epochs=3).rows() == expected.rows()
    assert_same(trainer.weights, whole.weights)


def test_quick_run_tries_everything_and_leaves_nothing(tmp_path: Path) -> None:
    ends: list[int] = []
    trainer = Trainer(MODEL, SGD(0.05), logdir=tmp_path / "run")
    callbacks = [LambdaCallback(on_epoch_end=lambda epoch, logs: ends.append(epoch))]
    history = fit(trainer, epochs=5, batch_size=2, callbacks=callbacks, fast_dev_run=True)
    assert ends == history.epoch == [0]
    assert trainer.summary is not None and trainer.summary.examples == 6
    assert not (tmp_path / "run").exists()
    assert not trainer.weights["weights"].any()


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"callbacks": [EarlyStopping("val_acc")]}, ConfigError, "val_loss"),
        ({"callbacks": [EarlyStopping()], "validation_data": None}, ConfigError, "there are loss"),
        ({"epochs": 0}, ConfigError, "epochs is 0; expected an int of at least 1"),
        ({"validation_data": (X[:0], Y[:0])}, DataError, "evaluation set has 0 examples"),
        ({"shuffle": False}, ConfigError, r"fit got shuffle \(False\); expected none: each pass"),
        ({"seed": 3}, ConfigError, r"give it to Trainer\(seed="),
        ({"epoch": 3}, ConfigError, "no option 'epoch'.*did you mean epochs"),
        ({"train": X}, ConfigError, "no option 'train'.*did you mean x"),
        ({"labels": Y}, ConfigError, "no option 'labels'.*did you mean y"),
        ({"sample_weight": {"a": Y[:17, 0]}}, ConfigError, "expected one, with a weight for each"),
        ({"sample_weight": [Y[:17, 0]] * 2}, ConfigError, "expected one, with a weight for each"),
        ({"sample_weight": np.ma.masked_less(X[:17, 0], 9)}, DataError, "with 17 masked values"),
        ({"sample_weight": [*"x" * 17]}, DataError, "sample_weight holds x"),
        ({"sample_weight": [1.0] * 16 + [math.nan]}, DataError, "holds NaN or infinity"),
        ({"sample_weight": [1.0] * 16 + [1e39]}, DataError, "1e.39, which is infinite"),
        ({"sample_weight": [2**24 + 1] * 17}, DataError, "16777217 .* give weights as floats"),
        ({"class_weight": [1.0, 2.0]}, ConfigError, "class_weight"),
        ({"x": None}, ConfigError, "fit got no examples"),
        ({"steps_per_epoch": -4}, ConfigError, "steps_per_epoch is -4; expected at least 0"),
        ({"x": ([1, 2], [3, 4])}, DataError, "arrays"),
        ({"x": (X[:3], Y[:4])}, DataError, "rows"),
    ],
)
def test_mistake_is_told_before_anything_is_trained(
    options: dict[str, Any], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        fit(Trainer(MODEL, SGD(0.05)), **options)


def test_calls_are_written_as_in_keras_and_batches_are_as_large() -> None:
    trainer = Trainer(MODEL, SGD(0.05))
    usual: dict[str, Any] = {"shuffle": np.True_, "initial_epoch": 0, "validation_freq": 1}
    trainer.fit(x=np.tile(X, (3, 1)), y=np.tile(Y, (3, 1)), verbose=0, **usual)
    assert trainer.summary is not None
    assert trainer.summary.global_step == 3  # 69 examples in batches of 32
    measures = trainer.evaluate(x=X, y=Y, verbose=0, return_dict=True)
    assert measures == trainer.evaluate((X, Y))
    assert trainer.predict(x=X, verbose="auto").shape == (23, 1)


@pytest.mark.parametrize("method", ["evaluate", "predict"])
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"verbose": 2}, "got verbose .2"),
        ({"batchsize": 4}, "did you mean batch_size"),
        ({}, "got no examples"),
        ({"x": X, "batch_size": -3}, "batch_size is -3"),
        ({"x": X[:0]}, "there are no examples"),
    ],
)
def test_call_that_cannot_be_meant_is_refused(method: str, options: Any, text: str) -> None:
    with pytest.raises((ConfigError, DataError), match=re.compile(text, re.DOTALL)):
        getattr(Trainer(MODEL, SGD(0.05)), method)(**options)


def test_metric_that_does_not_fit_the_outputs_is_told_before_anything_is_trained() -> None:
    trainer = Trainer(MLP(2, (), 3), SGD(0.05), metrics=[MeanAbsoluteError()])
    labels = np.arange(23) % 3
    with pytest.raises(ConfigError, match="MeanAbsoluteError"):
        fit(trainer, (X, labels), validation_data=(X, labels))


def test_callbacks_are_called_at_evaluations_and_predictions() -> None:
    calls: list[str] = []

    class Calls(Callback):
        def on_test_end(self, logs: Any = None) -> None:
            calls.append("test")

        def on_predict_end(self, logs: Any = None) -> None:
            calls.append(f"predict {logs.pop('outputs').shape}")

    trainer = Trainer(MLP(2, (), 3), SGD(0.1), metrics=[Accuracy(name="share")])
    measures = trainer.evaluate(X, np.arange(23) % 3, callbacks=[Calls()])
    assert set(measures) == {"loss", "accuracy", "share"}
    assert trainer.predict(X, callbacks=[Calls()], batch_size=10).shape == (23, 3)
    assert calls == ["test", "predict (23, 3)"]


def test_schedule_of_the_optimizer_is_seen_and_can_be_replaced() -> None:
    seen: list[float] = []

    def look(epoch: int, rate: float) -> float:
        seen.append(rate)
        return rate if epoch == 0 else 0.5

    schedule = Exponential(0.1, decay_steps=4, decay_rate=0.1, staircase=True)
    callbacks = [LearningRateScheduler(look)]
    history = fit(Trainer(MODEL, SGD(schedule)), epochs=3, callbacks=callbacks)
    assert seen == pytest.approx([0.1, 0.01, 0.5])
    assert history.history["learning_rate"] == pytest.approx([0.01, 0.5, 0.5])


POLICIES = [
    *("hogwild", "bounded-staleness:1", "sync-replicas", "sync-replicas:aggregate=4"),
    "sync-replicas:aggregate=2,tokens=2",
]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("ps", [1, 2])
def test_epochs_of_a_cluster_are_exact_passes_too(policy: str, ps: int) -> None:
    train, ends = Watched(*TRAIN), []
    options: dict[str, Any] = {"metrics": [Count()], "policy": policy, "prefetch": 0}
    trainer = Trainer(MODEL, SGD(0.05), workers=3, ps=ps, **options)
    best = EarlyStopping(patience=9, restore_best=True)
    callbacks = [LambdaCallback(on_epoch_end=lambda epoch, logs: ends.append(logs)), best]
    history = fit(trainer, train, epochs=3, callbacks=callbacks)
    assert trainer.summary is not None and trainer.summary.examples == 51
    assert history.epoch == [0, 1, 2] and history.history["loss"] == [log["loss"] for log in ends]
    assert history.history["count"] == [17] * 3  # whatever was dropped or computed anew
    assert np.isfinite(history.history["val_loss"]).all()
    if "tokens" not in policy:  # whose first gradients are dropped, and computed anew
        seen = [example for batch in train.batches if len(batch) > 1 for example in batch]
        assert {seen.count(example) for example in range(17)} <= {3, 4, 5}
    assert trainer.evaluate(VALIDATION)["loss"] == min(history.history["val_loss"])


@pytest.mark.parametrize(
    ("policy", "workers", "batch_size", "whole_batch"),
    # Of two workers, one could make more than its half of four gradients.
    [("sync-replicas", 2, 5, 10), ("sync-replicas:aggregate=4", 1, 3, 12)],
)
def test_example_of_a_short_batch_weighs_as_much_as_any_other(
    policy: str, workers: int, batch_size: int, whole_batch: int
) -> None:
    whole = Trainer(MODEL, SGD(0.05))
    expected = fit(whole, epochs=3, batch_size=whole_batch)
    parts = Trainer(MODEL, SGD(0.05), workers=workers, ps=2, policy=policy, partition_nbytes=4)
    history = fit(parts, epochs=3, batch_size=batch_size)
    assert history.history["loss"] == pytest.approx(expected.history["loss"], abs=1e-6)
    for name, value in whole.weights.items():
        np.testing.assert_allclose(parts.weights[name], value, atol=1e-6)


def spoiler(hook: str) -> LambdaCallback:
    """Return a callback that adds 1 to all weights at a hook."""

    def spoil(*arguments: Any) -> None:
        callback.model.set_weights([value + 1 for value in callback.model.get_weights()])

    callback = LambdaCallback(**{hook: spoil})
    return callback


@pytest.mark.parametrize("policy", ["sync-replicas", "hogwild"])
@pytest.mark.parametrize("has_logdir", [False, True])
def test_rate_and_weights_set_by_callbacks_count_in_a_cluster_too(
    tmp_path: Path, policy: str, has_logdir: bool
) -> None:
    def callbacks() -> list[Any]:
        return [
            ReduceLROnPlateau(patience=1, min_delta=10, factor=0.5),
            LearningRateScheduler(lambda epoch, rate: 0.8 * rate),
            *map(spoiler, ("on_epoch_begin", "on_epoch_end")),
        ]

    whole = Trainer(MODEL, Momentum(0.05, 0.5))
    expected = fit(whole, epochs=4, batch_size=10, callbacks=callbacks())
    trainer = Trainer(
        *(MODEL, Momentum(0.05, 0.5)),
        workers=2 if policy == "sync-replicas" else 1,
        ps=2,
        policy=policy,
        partition_nbytes=4,
        logdir=tmp_path if has_logdir else None,
    )
    for epochs in (2, 4) if has_logdir else (4,):
        size = 5 if policy == "sync-replicas" else 10
        history = fit(trainer, epochs=epochs, batch_size=size, callbacks=callbacks())
    for name, values in expected.history.items():
        assert history.history[name] == pytest.approx(values, rel=1e-4), name
    for name, value in whole.weights.items():
        np.testing.assert_allclose(trainer.weights[name], value, rtol=1e-4)


@pytest.mark.parametrize("ps", [None, 2])
def test_rate_and_weights_set_before_the_first_epoch_are_honoured(ps: int | None) -> None:
    def begin(logs: Any = None) -> None:
        setter.model.set_weights([np.full((2, 1), 3, np.float32), np.ones(1, np.float32)])
        setter.model.optimizer.learning_rate = 0

    setter, trainer = LambdaCallback(on_train_begin=begin), Trainer(MODEL, SGD(0.05), ps=ps)
    fit(trainer, epochs=1, callbacks=[setter])
    assert [value.tolist() for value in trainer.weights.values()] == [[[3], [3]], [1]]


def test_callback_may_end_the_training_within_an_epoch() -> None:
    def stop(batch: int, logs: Any) -> None:
        stopper.model.stop_training = batch == 1

    stopper, trainer = LambdaCallback(on_train_batch_end=stop), Trainer(MODEL, SGD(0.05))
    history = fit(trainer, epochs=9, callbacks=[stopper])
    weights, losses = reference(0, [0.05] * 2)
    assert history.epoch == [0] and history.history["loss"] == pytest.approx([np.mean(losses)])
    assert_same(trainer.weights, weights)
    assert trainer.summary is not None and trainer.summary.exit_code == 0


def test_rate_set_within_an_epoch_counts_from_the_next_step_on() -> None:
    def halve(batch: int, logs: Any) -> None:
        optimizer = halver.model.optimizer
        optimizer.learning_rate = optimizer.learning_rate / 2

    halver, trainer = LambdaCallback(on_train_batch_end=halve), Trainer(MODEL, SGD(0.08))
    fit(trainer, epochs=2, callbacks=[halver])
    weights, _ = reference(0, [0.08 / 2**step for step in range(8)])
    assert_same(trainer.weights, weights)


@pytest.mark.parametrize("workers", [1, 2])
def test_averages_that_are_evaluated_are_what_callbacks_see_and_what_is_left(workers: int) -> None:
    seen: list[Any] = []
    looker = LambdaCallback(on_epoch_end=lambda e, logs: seen.append(looker.model.get_weights()))
    trainer = Trainer(
        *(MODEL, SGD(0.05)), workers=workers, moving_average=0.9, evaluate_average=True
    )
    best = EarlyStopping(patience=9, restore_best=True)
    history = fit(trainer, epochs=3, callbacks=[looker, best])
    for value, last in zip(trainer.weights.values(), seen[-1], strict=True):
        assert np.array_equal(value, last)
    assert trainer.summary is not None
    assert trainer.evaluate(VALIDATION)["loss"] == min(history.history["val_loss"])
    assert trainer.summary.measures["loss"] == min(history.history["val_loss"])


@pytest.mark.parametrize("workers", [1, 2])
def test_classes_weigh_as_their_examples_would(workers: int) -> None:
    labels = np.arange(23) % 3
    weights = np.array([1, 5, 0])[labels]

    def trained(**options: Any) -> dict[str, Any]:
        trainer = Trainer(*(MLP(2, (), 3), SGD(0.1)), workers=workers, policy="sync-replicas")
        fit(trainer, (X, labels), epochs=2, validation_data=(X, labels), **options)
        return trainer.weights

    plain, by_class = trained(), trained(class_weight={1: 5.0, 2: 0.0})
    assert not np.array_equal(plain["layer0/bias"], by_class["layer0/bias"])
    for name, value in trained(sample_weight=weights).items():
        assert np.array_equal(by_class[name], value)


def test_weights_of_examples_need_arrays_and_classes_a_number() -> None:
    with pytest.raises(ConfigError, match="sample_weight"):
        fit(Trainer(MODEL, SGD(0.05)), NoisyLine(), sample_weight=[1])
    with pytest.raises(ConfigError, match="class_weight"):
        fit(Trainer(MODEL, SGD(0.05)), class_weight={"a": 1.0})


def test_trainer_begins_with_given_weights() -> None:
    given = {"weights": np.full((2, 1), 3, np.float32), "bias": np.ones(1, np.float32)}
    trainer = Trainer(MODEL, SGD(0.0), initial=given)
    assert np.array_equal(trainer.weights["weights"], given["weights"])
    fit(trainer, epochs=1)
    assert np.array_equal(trainer.weights["weights"], given["weights"])
    with pytest.raises(ConfigError, match="initial"):
        Trainer(MODEL, SGD(0.0), initial=[1])


SHIFT: list[float] = []


FROZEN: set[str] = set()


class Shifted(LinearRegression):
    """Model with a constant."""

    __slots__ = ()

    def frozen(self, seed: int) -> dict[str, Any]:
        return {"shift": np.array(SHIFT, np.float32)}


@pytest.mark.parametrize("workers", [1, 2])
def test_frozen_variables_of_a_resumed_job_are_those_of_its_checkpoint(
    tmp_path: Path, workers: int
) -> None:
    SHIFT[:] = [3]
    trainer = Trainer(Shifted(2), SGD(0.05), logdir=tmp_path, workers=workers, save_secs=1e-9)
    fit(trainer, epochs=2)
    files = list(tmp_path.glob("checkpoints/step-*/frozen.safetensors"))
    assert len({file.stat().st_ino for file in files}) == 1  # written once
    SHIFT[:] = [4]
    again = Trainer(Shifted(2), SGD(0.05), logdir=tmp_path, workers=workers)
    fit(again, epochs=3)
    assert again.weights["shift"] == zmqtrain.load(tmp_path)["shift"] == 3
    SHIFT[:] = [3, 3]
    with pytest.raises(CheckpointError, match="shift"):
        fit(Trainer(Shifted(2), SGD(0.05), logdir=tmp_path, workers=workers), epochs=4)


class WithoutBias(LinearRegression):
    __slots__ = ()

    def parameters(self, seed: int) -> Any:
        return {"weights": super().parameters(seed)["weights"]}


@pytest.mark.parametrize("workers", [1, 2])
def test_checkpoint_with_variables_that_the_model_does_not_have_is_refused(
    workers: int, tmp_path: Path
) -> None:
    fit(Trainer(MODEL, SGD(0.05), logdir=tmp_path), epochs=1)
    smaller = Trainer(WithoutBias(2), SGD(0.05), logdir=tmp_path, workers=workers)
    with pytest.raises((CheckpointError, RunFailedError), match=r"does not have: bias; .*export"):
        fit(smaller, epochs=2)


class Split(LinearRegression):
    """Its bias is frozen while FROZEN says so."""

    __slots__ = ()

    def parameters(self, seed: int) -> Any:
        return {n: v for n, v in super().parameters(seed).items() if n not in FROZEN}

    def frozen(self, seed: int) -> Any:
        return {n: v for n, v in super().parameters(seed).items() if n in FROZEN}

    def loss_and_gradients(self, parameters: Any, batch: Any, out: Any) -> float:
        both = {n: out[n] if n in out else np.empty_like(v) for n, v in parameters.items()}
        return super().loss_and_gradients(parameters, batch, both)


@pytest.mark.parametrize("workers", [1, 2])
def test_resumed_job_may_freeze_variables_and_train_them_again_with_new_moments(
    workers: int, tmp_path: Path
) -> None:
    def go_on(epochs: int, optimizer: Any) -> Any:
        options: dict[str, Any] = {"policy": "sync-replicas", "workers": workers}
        trainer = Trainer(Split(2), optimizer, logdir=tmp_path, **options)
        fit(trainer, (X[:16], Y[:16]), batch_size=16 // workers, epochs=epochs)
        return trainer.weights

    FROZEN.clear()
    momentum = Momentum(0.05, 0.9)
    first = go_on(3, momentum)
    FROZEN.add("bias")
    frozen = go_on(5, momentum)
    weights, moments = MODEL.parameters(0), MODEL.parameters(0)
    for epoch in range(5):
        out = {name: np.empty_like(value) for name, value in weights.items()}
        MODEL.loss_and_gradients(weights, (X[:16], Y[:16]), out)
        for name in out if epoch < 3 else ["weights"]:
            moments[name] = 0.9 * moments[name] + out[name]
            weights[name] -= 0.05 * moments[name]
    assert np.array_equal(frozen["bias"], first["bias"])
    np.testing.assert_allclose(frozen["weights"], weights["weights"], rtol=1e-5)
    FROZEN.clear()
    again, out = go_on(6, momentum), {n: np.empty_like(v) for n, v in weights.items()}
    MODEL.loss_and_gradients(frozen, (X[:16], Y[:16]), out)
    np.testing.assert_allclose(again["bias"], frozen["bias"] - 0.05 * out["bias"], rtol=1e-5)
    moved = 0.05 * (0.9 * moments["weights"] + out["weights"])
    np.testing.assert_allclose(again["weights"], frozen["weights"] - moved, rtol=1e-5)


def test_variables_count_in_a_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ZMQTRAIN_BATCH_SIZE", "17")
    trainer = Trainer(MODEL, SGD(0.05))
    fit(trainer, epochs=2)
    assert trainer.summary is not None and trainer.summary.global_step == 2
    monkeypatch.setenv("ZMQTRAIN_BATCH_SIZE", "many")
    with pytest.raises(ConfigError, match="BATCH_SIZE"):
        fit(trainer)
    monkeypatch.setenv("ZMQTRAIN_BATCH_SIZE", "5")
    monkeypatch.setenv("ZMQTRAIN_STEPS", "3")
    job = zmqtrain.Job(model=LinearRegression(), data=NoisyLine(examples=20), optimizer=SGD(0.1))
    assert zmqtrain.run(job, on_progress=lambda status: None).global_step == 3
    (link := tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.setenv("ZMQTRAIN_LOGDIR", str(link))
    fit(trainer)
    assert trainer.logdir == str(link)  # from which a task without the weights reads them


@pytest.mark.parametrize("workers", [1, 2])
def test_data_smaller_than_a_batch_is_an_epoch_of_one_batch(workers: int) -> None:
    trainer = Trainer(MODEL, SGD(0.05), workers=workers)
    history = fit(trainer, epochs=2, batch_size=1000)
    assert len(history.history["loss"]) == 2
    assert trainer.summary is not None and trainer.summary.examples == 2 * len(TRAIN[0])


def test_features_and_labels_may_be_two_arguments_and_a_part_is_held_out() -> None:
    def fitted(*train: Any, **options: Any) -> zmqtrain.History:
        trainer = Trainer(MODEL, SGD(0.05), seed=3)
        return trainer.fit(*train, batch_size=5, verbose=False, **options)

    history = fitted(X, Y, validation_split=0.25)
    assert history.history == fitted(Holdout((X, Y), 0.25, seed=3)).history
    assert "val_loss" in history.history
    with pytest.raises(ConfigError, match="validation_split"):
        fitted(X, Y, validation_split=0.25, validation_data=VALIDATION)


@pytest.mark.parametrize("ps", [0, 1])
def test_early_stop_ends_three_workers_and_a_prime_number_of_examples_is_measured_whole(
    ps: int,
) -> None:
    trainer = Trainer(MODEL, SGD(0.05), workers=3, ps=ps, policy="sync-replicas")
    never_better = EarlyStopping(patience=2, min_delta=1e9)
    history = fit(trainer, epochs=20, validation_data=TRAIN, callbacks=[never_better])
    assert history.epoch == [0, 1, 2]
    assert trainer.summary is not None and trainer.summary.examples == 3 * 17
    scratch = {name: np.empty_like(value) for name, value in trainer.weights.items()}
    loss = MODEL.loss_and_gradients(trainer.weights, TRAIN, scratch)
    assert history.history["val_loss"][-1] == pytest.approx(loss, rel=1e-5)


class Ratings:
    """An own model of users and items: a rating is the sum of a bias of each."""

    def parameters(self, seed: int) -> dict[str, Any]:
        return {"user": np.zeros(30, np.float32), "item": np.zeros(500, np.float32)}

    def predict(self, parameters: Any, batch: Any) -> Any:
        return parameters["user"][batch[0]] + parameters["item"][batch[1]] + np.float32(3)

    def metrics(self, parameters: Any, batch: Any) -> dict[str, float]:
        return {"loss": float(np.square(self.predict(parameters, batch) - batch[2]).mean())}

    def loss_and_gradients(self, parameters: Any, batch: Any, out: Any) -> float:
        outputs = self.predict(parameters, batch)
        errors = outputs - batch[2]
        for name, places in zip(("user", "item"), batch, strict=False):
            out[name][...] = 0
            np.add.at(out[name], places, 2 * errors / len(errors))
        measured(out, len(errors), {}, lambda: (outputs, batch))
        return float(np.square(errors).mean())


class KnownRatings(Ratings):
    labels_at = 2


USERS, ITEMS = RANDOM.integers(0, 30, 40), RANDOM.integers(0, 500, 40)
STARS = RANDOM.integers(1, 6, 40).astype(np.float32)


@pytest.mark.parametrize("class_weight", [None, {1: 2.0}])
def test_labels_of_an_own_model_are_those_that_it_names(class_weight: Any) -> None:
    data = USERS, ITEMS, STARS
    options = {"validation_data": data, "batch_size": 40, "class_weight": class_weight}
    trainer = Trainer(KnownRatings(), SGD(0.1), metrics=[MeanAbsoluteError()])
    history = fit(trainer, data, **options).history
    assert history["mean_absolute_error"] == [pytest.approx(np.mean(abs(3 - STARS)))]
    expected = np.mean(abs(trainer.predict(data) - STARS))
    assert history["val_mean_absolute_error"] == [pytest.approx(expected)]
    with pytest.raises(ConfigError, match=r"needs labels.*give it labels_at"):
        fit(Trainer(Ratings(), SGD(0.1), metrics=[MeanAbsoluteError()]), data, **options)


def test_classes_of_an_own_model_are_not_guessed() -> None:
    data = USERS, ITEMS, STARS
    with pytest.raises(ConfigError, match=r"class_weight.*labels_at"):
        fit(Trainer(Ratings(), SGD(0.1)), data, class_weight={1: 2.0}, validation_data=None)


def test_job_is_refused_at_its_start_if_nobody_knows_the_labels() -> None:
    data = Arrays((USERS, ITEMS, STARS), (USERS, ITEMS, STARS))
    fields = {"optimizer": SGD(0.1), "metrics": [Accuracy()], "batch_size": 40}
    job = zmqtrain.Job(model=Ratings(), data=data, **fields)
    seen: list[Any] = []
    with pytest.raises(ConfigError, match="labels_at"):
        zmqtrain.run(job, on_progress=seen.append)
    assert not any(status.step for status in seen)


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("epochs", "give epochs to fit"),
        ("batchsize", "did you mean batch_size"),
        ("steps", "steps"),
    ],
)
def test_option_that_is_none_of_a_trainer_is_refused(option: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        fit(Trainer(MODEL, SGD(0.05), **{option: 3}))
