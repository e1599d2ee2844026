"""Callbacks, fed with measures as a training would feed them."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import fields
from functools import partial
from math import inf, nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file

from tests.events import events_in
from zmqtrain import History
from zmqtrain.callbacks import (
    Callback,
    CSVLogger,
    EarlyStopping,
    JSONLogger,
    LambdaCallback,
    LearningRateScheduler,
    ModelCheckpoint,
    ModelView,
    ProgressBar,
    ReduceLROnPlateau,
    TensorBoard,
)
from zmqtrain.callbacks.base import CallbackList
from zmqtrain.errors import CheckpointError, ConfigError
from zmqtrain.models.base import as_model
from zmqtrain.observe.metrics import Phases
from zmqtrain.protocol.status import TableStatus


def view(rate: float | None = 0.1) -> ModelView:
    model = ModelView(object())
    model.optimizer.show(rate)
    return model


def train(
    callback: Any, measures: Iterable[Any], model: ModelView | None = None, state: Any = None
) -> ModelView:
    """Call a callback's hooks, epoch by epoch, until it stops; the weight is the epoch's number.

    A number is the ``val_loss`` of an epoch, a dict all that was measured.
    """
    model = model or view()
    calls = CallbackList([callback])
    calls.begin(model, {"epochs": 9, "steps": 3, "initial_epoch": int(bool(state))})
    calls.call("on_train_begin", {})
    calls.restore(state or [])
    for epoch, measured in enumerate(measures):
        logs = measured if isinstance(measured, dict) else {"loss": 1.0, "val_loss": measured}
        calls.call("on_epoch_begin", epoch, {})
        model.show({"w": np.array([epoch], np.float32)})
        model.examples, model.step = 30, 10 * epoch
        if getattr(callback, "every_steps", None):
            calls.call("on_steps", model.step, {"loss": 5.0})
        calls.call("on_epoch_end", epoch, logs)
        if model.stop_training:
            break
    calls.call("on_train_end", {})
    return model


@pytest.mark.parametrize(
    ("options", "losses", "stopped", "best"),
    [
        ({}, [3, 2, 2, 1], 2, 1),
        ({"patience": 2}, [3, 2, 4, 1, 1, 1, 0], 5, 3),
        ({"patience": 2}, [3, 2, nan, nan], 3, 1),
        ({"min_delta": 0.5}, [3, 2, 1.8], 2, 1),
        ({"mode": "max"}, [3, 4, 2], 2, 1),
        ({"baseline": 1}, [3, 2, 2], 2, 1),
        ({"patience": 2, "baseline": 1}, [3, 2, 0.5, 1, 1], 4, 2),
        ({}, [2, 3], 1, 0),
        ({}, [nan, 2, 3], 1, 0),
        ({"patience": 2}, [nan, nan, 3, 2], 2, 0),
        ({"patience": 2}, [nan, nan, nan, nan], 2, 0),
        ({"patience": 2}, [3, nan, nan, 2], 2, 0),
        ({}, [nan, nan], 1, 0),
        ({"start_from_epoch": 2}, [1, 2, 3, 2, 2], 4, 3),
    ],
)
def test_early_stopping_waits_for_something_better(
    options: dict[str, Any], losses: list[float], stopped: int, best: int
) -> None:
    callback = EarlyStopping(**options, restore_best=True)
    model = train(callback, losses)
    assert (callback.stopped_epoch, callback.best_epoch) == (stopped, best)
    assert model.weights["w"] == best


def test_training_that_is_not_stopped_ends_with_the_best_weights_too() -> None:
    model = train(EarlyStopping(patience=9, restore_best=True), [3, 1, 2])
    assert not model.stop_training
    assert model.weights["w"] == 1 and model.weights_changed


FOLLOWERS: list[Any] = [
    EarlyStopping,
    ReduceLROnPlateau,
    partial(ModelCheckpoint, "best.npz", save_best_only=True),
]


@pytest.mark.parametrize(
    ("name", "best"),
    [
        *((f"val_{name}", 0.9) for name in ("accuracy", "acc", "auc", "precision", "recall", "f1")),
        *((f"val_{name}_loss", 0.5) for name in ("acceleration", "jaccard", "f1", "auc", "recall")),
        ("loss", 0.5),
        ("account_mean_squared_error", 0.5),
        ("val_mae", 0.5),
        ("val_faucet_mae", 0.5),
        ("val_top_k_categorical_accuracy", 0.9),
        ("iou", 0.9),
        ("val_iou", 0.9),
        ("recall_of_errors", 0.9),
        ("odd_loss", 0.9),
    ],
)
def test_best_value_is_the_largest_or_smallest_as_the_measure_says(
    name: str, best: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    known = ("iou", True), ("odd_loss", True), ("recall_of_errors", True)
    metrics = [SimpleNamespace(name=name, larger_is_better=is_max) for name, is_max in known]
    first = 1.4 - best  # the other one of 0.5 and 0.9
    for follower in FOLLOWERS:
        model, callback = ModelView(object(), metrics), follower(monitor=name)
        model.optimizer.show(0.1)
        train(callback, [{name: first}, {name: best}, {name: first}], model)
        assert callback.best == best, follower


@pytest.mark.parametrize(
    "name",
    [
        *("val_iou", "val_bleu", "tobacco", "accident", "dropped_recall", "inaccuracy"),
        "val_neg_log_loss",
    ],
)
def test_measure_of_unknown_direction_needs_a_mode(name: str) -> None:
    for follower in FOLLOWERS:
        with pytest.raises(ConfigError, match=f"{name}.*mode='max'"):
            train(follower(monitor=name), [{name: 1.0}])
    callback = EarlyStopping(name, mode="max", patience=1)
    train(callback, [{name: 0.5}, {name: 0.9}, {name: 0.8}])
    assert callback.best == 0.9


def test_epoch_that_lacks_the_measure_is_told_and_does_not_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    callback = EarlyStopping(patience=1)
    train(callback, [2.0, {"loss": 1.0}, {"loss": 1.0}, 1.0])
    assert (callback.best, callback.stopped_epoch) == (1.0, None)
    assert "'val_loss', which this epoch has not measured" in caplog.text


def test_early_stopping_goes_on_counting_after_a_resume() -> None:
    before, after = EarlyStopping(patience=3), EarlyStopping(patience=3)
    train(before, [1, 2, 2])
    train(after, [2, 2], state=CallbackList([before]).state())
    assert after.stopped_epoch == 1 and after.wait == 4


@pytest.mark.parametrize("kind", [EarlyStopping, ReduceLROnPlateau])
def test_callback_of_a_second_training_begins_anew(kind: Any) -> None:
    callback = kind(patience=2)
    train(callback, [1, 2, 2])
    model = train(callback, [9, 8])
    assert (callback.best, callback.wait, model.stop_training) == (8, 0, False)


@pytest.mark.parametrize(
    "after",
    [
        [EarlyStopping("loss", patience=3)],
        [ReduceLROnPlateau()],
        [],
        [ProgressBar(), ProgressBar()],
    ],
)
def test_callback_that_is_another_one_begins_anew(after: list[Any]) -> None:
    before = EarlyStopping(patience=3)
    train(before, [1, 2, 2])
    calls = CallbackList(after)
    calls.restore(CallbackList([before]).state())
    assert [vars(one).get("best") for one in after] == [None] * len(after)


def test_state_of_numpy_values_is_kept_and_that_of_objects_is_refused() -> None:
    callback = Callback()
    callback.state = lambda: {"a": np.float32(0.5), "b": np.arange(2)}  # type: ignore[attr-defined]
    assert CallbackList([callback]).state() == [["Callback", None, {"a": 0.5, "b": [0, 1]}]]
    callback.state = lambda: {"a": object()}  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="plain data"):
        CallbackList([callback]).state()


def test_best_weights_are_kept_in_a_file(tmp_path: Path) -> None:
    train(ModelCheckpoint(tmp_path / "best", save_best_only=True), [3, 1, 2])
    assert load_file(tmp_path / "best.safetensors")["w"] == 1


def test_weights_of_each_epoch_are_kept_under_names_that_tell_them_apart(tmp_path: Path) -> None:
    train(ModelCheckpoint(tmp_path / "deep/{epoch:02d}-{val_loss:.1f}.npz"), [3, 1])
    files = sorted(path.name for path in (tmp_path / "deep").iterdir())
    assert files == ["01-3.0.npz", "02-1.0.npz"]
    assert np.load(tmp_path / "deep/02-1.0.npz")["w"] == 1


def test_digits_of_a_measure_are_no_ending(tmp_path: Path) -> None:
    train(ModelCheckpoint(tmp_path / "best-{val_loss:.3f}"), [1])
    assert [path.name for path in tmp_path.iterdir()] == ["best-1.000.safetensors"]


@pytest.mark.parametrize("path", ["{accuracy}", "{", "weights.h5"])
def test_path_that_makes_no_sense_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(ConfigError):
        train(ModelCheckpoint(tmp_path / path), [1])


def test_names_are_checked_at_the_start_as_far_as_they_can_be_known() -> None:
    halve = LearningRateScheduler(lambda epoch, rate: rate / 2)
    wrong, fine = ModelCheckpoint("{acc:.2f}"), ModelCheckpoint("{epoch}-{learning_rate}-{loss}")
    CallbackList([halve, fine]).check(["loss"])
    CallbackList([object(), wrong]).check(["loss"])  # the first may add measures
    for callbacks in ([wrong], [fine], [EarlyStopping("acc")]):
        with pytest.raises(ConfigError, match="not measured"):
            CallbackList(callbacks).check(["loss"])


def test_rate_is_what_the_schedule_says() -> None:
    rates: list[float] = []
    model = view()
    halve = LearningRateScheduler(lambda epoch, rate: rate / 2)
    measures: list[dict[str, Any]] = [{}, {}, {}]
    train(halve, measures, model)
    assert [logs["learning_rate"] for logs in measures] == [0.05, 0.025, 0.0125]
    assert model.optimizer.learning_rate == 0.0125 and not rates


@pytest.mark.parametrize(
    ("options", "losses", "rates"),
    [
        ({"patience": 1, "factor": 0.5}, [1, 1, 1, 0], [8, 8, 4, 2]),
        ({"patience": 2, "factor": 0.5}, [1, 1, 1, 1, 1], [8, 8, 8, 4, 4]),
        ({"patience": 1, "factor": 0.1, "min_lr": 2}, [1, 1, 1, 1], [8, 8, 2, 2]),
        ({"patience": 1, "factor": 0.5, "cooldown": 2}, [1, 1, 1, 1, 1], [8, 8, 4, 4, 2]),
        ({"patience": 1, "factor": 0.5, "min_delta": 0.5}, [1, 0.7, 0.4], [8, 8, 4]),
    ],
)
def test_rate_is_reduced_on_a_plateau(
    options: dict[str, Any], losses: list[float], rates: list[float]
) -> None:
    measures = [{"val_loss": loss} for loss in losses]
    train(ReduceLROnPlateau(**options), measures, view(8.0))
    assert [logs["learning_rate"] for logs in measures] == rates


def test_rate_of_an_optimizer_without_one_cannot_be_used() -> None:
    with pytest.raises(ConfigError, match="LearningRateScheduler"):
        train(LearningRateScheduler(lambda epoch, rate: rate), [1], view(None))


@pytest.mark.parametrize("rate", [-1, nan, inf, "fast", None])
def test_rate_that_is_none_is_refused(rate: Any) -> None:
    with pytest.raises(ConfigError, match="learning rate"):
        view().optimizer.learning_rate = rate


def test_csv_file_has_a_line_for_each_epoch_of_all_runs(tmp_path: Path) -> None:
    path = tmp_path / "new/log.csv"
    first = {"loss": 2.0, "matrix": np.eye(2)}
    train(CSVLogger(path), [{"loss": 9.0}])
    train(CSVLogger(path), [first, {"loss": 1.0, "text": "a"}])
    train(CSVLogger(path, append=True), [{"loss": 0.5, "more": 1.0}])
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [row["loss"] for row in rows] == ["2.0", "1.0", "0.5"]
    assert rows[0].keys() == {"epoch", "loss"}


def test_json_lines_are_strict_json(tmp_path: Path) -> None:
    path = tmp_path / "new/log.jsonl"
    measures = {"loss": np.float32(0.5), "matrix": np.eye(1), "bad": nan, "text": "a", "no": None}
    train(JSONLogger(path), [measures])
    (line,) = path.read_text().splitlines()
    assert json.loads(line, parse_constant=pytest.fail) == {
        "epoch": 0, "loss": 0.5, "matrix": [[1.0]], "bad": None, "text": "a", "no": None,
    }  # fmt: skip


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_shows_a_line_for_each_epoch(is_terminal: bool) -> None:
    console = Console(force_terminal=is_terminal, highlight=False, width=200)
    bar = ProgressBar(console)
    with console.capture() as capture:
        calls = CallbackList([bar])
        calls.begin(view(), {"epochs": 1, "steps": 3})
        calls.call("on_epoch_begin", 0, {})
        calls.call("on_train_batch_end", 0, {"loss": 4.0})
        named = {"[bold]x[/bold]": 1.0, "a\nb\x1b[2J": 3.0}
        calls.call("on_epoch_end", 0, {"loss": 2.0, "matrix": np.eye(2)} | named)
        calls.call("on_train_end", {})
    assert r"[bold]x[/bold] 1  a\nb\x1b[2J 3" in capture.get()
    assert "epoch 1/1" in capture.get() and "loss 2" in capture.get()
    assert ("loss 4" in capture.get()) is is_terminal


def slope(weights: Any, batch: Any, out: Any) -> float:
    """Be the ``loss_and_gradients`` of a model whose loss is w * sum(batch)."""
    out["w"][...] = batch[0].sum()
    return float(weights["w"].sum())


def test_tensorboard_reads_scalars_and_histograms(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("tensorboardX")
    caplog.set_level("INFO")
    model = view()
    worker = SimpleNamespace(task="worker 7", role="worker")
    told = {"staleness": {"mean": 1.25}, "rounds": 9, "of_rounds": {"agreement": 0.75}}
    found = {"tasks": [worker], "tables": {"user": TableStatus(None, 5, 640, forgotten=2)}}
    model.status = SimpleNamespace(**told, **found)  # type: ignore[assignment]
    model.source = as_model(
        SimpleNamespace(parameters=lambda seed: {"w": 0}, loss_and_gradients=slope)
    )
    batch = (np.ones(2, np.float32),)

    def measured() -> Iterator[dict[str, float]]:
        for epoch in (0, 1):
            spent_s = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) * (epoch + 1) ** 2
            worker.staleness, worker.phases_s = 1.5 + epoch, tuple(spent_s)
            yield {"loss": 4.0 - epoch, "val_loss": 2.0 - epoch}

    train(TensorBoard(tmp_path, histograms_every=1, gradients_of=batch), measured(), model)
    assert model.gradients(batch) == {"w": 2}
    found = {(kind, epoch, tag): value for kind, epoch, tag, value in events_in(tmp_path)}
    phases = [field.name for field in fields(Phases)]
    for epoch in (0, 1):
        assert found["train", epoch, "epoch_loss"] == 4 - epoch
        assert found["validation", epoch, "epoch_loss"] == 2 - epoch
        assert found["train", epoch, "examples_per_second"] > 0
        assert found["train", epoch, "staleness/mean"] == 1.25
        of_table = [found["train", epoch, f"tables/user/{n}"] for n in ("trained", "nbytes")]
        assert of_table == [5, 640]
        assert found["train", epoch, "staleness/worker_7"] == 1.5 + epoch
        assert found["train", epoch, "rounds/number"] == 9
        assert found["train", epoch, "rounds/agreement"] == 0.75
        of_phases = [found["train", epoch, f"{phase}_s/worker_7"] for phase in phases]
        assert of_phases == ([1, 2, 3, 4, 5, 6] if epoch == 0 else [3, 6, 9, 12, 15, 18])
        assert {("train", epoch, tag) for tag in ("w", "gradients/w")} <= found.keys()
    assert not caplog.records  # such as "Summary name ... is illegal"


def test_tensorboard_writes_by_step_at_the_steps(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    board = TensorBoard(tmp_path, update_freq=10, histograms_every=2)
    model = train(board, [3, 2, 1])
    CallbackList([board]).call("on_test_end", {"loss": 1.5})
    board.on_train_end()
    found = {(kind, step, tag): value for kind, step, tag, value in events_in(tmp_path)}
    assert [step for kind, step, tag in found if tag == "w"] == [0, 20]
    assert [step for kind, step, tag in found if tag == "examples_per_second"] == [0, 10, 20]
    assert found["train", 10, "batch_loss"] == 5
    assert found["validation", model.step, "evaluation_loss_vs_iterations"] == 1.5


def test_callback_without_a_base_class_gets_the_hooks_that_it_has() -> None:
    class Own:
        def on_epoch_end(self, epoch: int, logs: Any) -> None:
            self.seen = epoch, logs["val_loss"]

    own = Own()
    train(own, [3])
    assert own.seen == (0, 3)


def test_error_says_which_callback_and_which_hook() -> None:
    def fail(epoch: int, logs: Any) -> None:
        raise OSError("no space left")

    with pytest.raises(ConfigError, match=r"on_epoch_end\(\) of <.*LambdaCallback.*no space left"):
        train(LambdaCallback(on_epoch_end=fail), [1])
    with pytest.raises(ConfigError, match="did you mean on_epoch_end"):
        LambdaCallback(on_epoch_ends=fail)


def test_hooks_that_do_nothing_are_not_followed() -> None:
    assert not CallbackList([EarlyStopping()]).has("on_train_batch_end")
    assert CallbackList([ProgressBar()]).has("on_train_batch_end")
    hook = LambdaCallback(on_train_batch_end=print)
    assert CallbackList([hook]).has("on_train_batch_end")


def test_weights_can_be_set_as_they_were_got() -> None:
    model = view()
    model.show({"w": np.zeros(2, np.float32), "b": np.zeros((), np.float32)})
    weights = model.get_weights()
    weights[0] += 1
    assert not model.weights["w"].any()
    model.set_weights(weights)
    assert model.weights["w"].tolist() == [1, 1]
    model.set_weights({"b": weights[1], "w": weights[0] + 1})
    assert list(model.weights) == ["w", "b"] and model.weights["w"].tolist() == [2, 2]
    for wrong in (weights[:1], [np.zeros(3), weights[1]], {"v": weights[0], "b": weights[1]}):
        with pytest.raises(ConfigError):
            model.set_weights(wrong)


def test_file_of_weights_is_not_overwritten_unasked(tmp_path: Path) -> None:
    model = view()
    model.show({"w": np.zeros(2, np.float32)})
    model.save_weights(tmp_path / "w.npz")
    model.save_weights(tmp_path / "w.npz")
    with pytest.raises(CheckpointError):
        model.save_weights(tmp_path / "w.npz", overwrite=False)
    model.show({"w": np.ones(2, np.float32)})
    model.load_weights(tmp_path / "w.npz")
    assert not model.weights["w"].any() and model.weights_changed


def test_what_callbacks_cannot_use_is_told_with_what_they_have() -> None:
    with pytest.raises(AttributeError, match=r"'predict'.* gradients\(\)"):
        view().predict(np.zeros(3))


def history() -> History:
    history = History()
    history.add(0, {"loss": 2.0, "val_loss": 3.0})
    history.add(1, {"loss": 1.0, "val_loss": nan, "val_matrix": np.eye(2)})
    return history


def test_measure_that_appears_later_is_nan_before() -> None:
    late = history()
    late.add(2, {"loss": 0.5, "late": 7.0})
    assert np.isnan(late.history["late"][:2]).all() and late.history["late"][2] == 7
    assert late.epoch == [0, 1, 2]


def test_history_is_drawn_as_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    history().plot(tmp_path / "h.png")
    assert (tmp_path / "h.png").read_bytes().startswith(b"\x89PNG")


def test_history_comes_back_from_its_rows() -> None:
    rows = history().rows()
    again = History.of(rows)
    assert repr(again.rows()) == repr(rows)
