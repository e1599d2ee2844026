"""A Keras model as a model, on the backend of this process: what counts, what is refused."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")  # make test-frameworks runs both
keras = pytest.importorskip("keras")

import zmqtrain  # noqa: E402
from tests.adapters import step as steps  # noqa: E402
from tests.adapters.frameworks import Keras  # noqa: E402
from tests.adapters.step import BATCH, X, Y, same  # noqa: E402
from zmqtrain import Job  # noqa: E402
from zmqtrain.adapters.keras import BACKEND, KerasModel, load_weights  # noqa: E402
from zmqtrain.adapters.keras_optimizers import rule_of  # noqa: E402
from zmqtrain.callbacks import EarlyStopping, ModelView  # noqa: E402
from zmqtrain.data import Arrays  # noqa: E402
from zmqtrain.errors import ConfigError, DataError, RefusedError  # noqa: E402, RefusedError
from zmqtrain.metrics import Accuracy, MeanAbsoluteError  # noqa: E402
from zmqtrain.optim import SGD, MatrixRule, new_slots  # noqa: E402

layers = keras.layers


net = Keras().net


def branches() -> Any:
    """Return a model of two inputs and two outputs, with a loss of its own and a nested model."""
    first, second = keras.Input((5,), name="a"), keras.Input((2,), name="b")
    inner = keras.Sequential([keras.Input((5,)), layers.Dense(3, activity_regularizer="l2")])
    joined = layers.Concatenate()([inner(first), second])
    outputs = {"x": layers.Dense(1, name="x")(joined), "y": layers.Dense(2, name="y")(joined)}
    model = keras.Model([first, second], list(outputs.values()))
    model.compile("sgd", ["mse", "mae"], loss_weights=[1.0, 0.5])
    return model


class Step(steps.Step):
    def __init__(self, build: Callable[[], Any] = net, *options: Any) -> None:
        super().__init__(KerasModel(build, *options))


def arrays_of(variables: Any) -> dict[str, Any]:
    return {v.path: np.array(keras.ops.convert_to_numpy(v.value)) for v in variables}


MODELS = {
    "net": (net, BATCH),
    "statistics": (lambda: net(layers.BatchNormalization()), BATCH),
    "weights of examples": (net, (*BATCH, np.linspace(0, 2, 12, dtype=np.float32))),
    "branches": (branches, (X, X[:, :2], X[:, :1], X[:, 1:3])),
}


@pytest.mark.parametrize("case", MODELS)
def test_a_step_is_that_of_keras_itself(case: str) -> None:
    build, batch = MODELS[case]
    step = Step(build)
    keras.utils.set_random_seed(0)
    model = build()
    model.optimizer.learning_rate = 1.0
    inputs = len(model.inputs)
    outputs = len(model.outputs)
    parts = [batch[:inputs], batch[inputs:][:outputs], batch[inputs + outputs :]]
    x, y, weight = (list(part) if len(part) > 1 else (part or [None])[0] for part in parts)
    before = list(arrays_of(model.trainable_variables).values())
    logs = model.train_on_batch(x, y, sample_weight=weight, return_dict=True)
    after = list(arrays_of(model.trainable_variables).values())

    assert step(batch) == pytest.approx(float(logs["loss"]), rel=1e-5)
    for own, old, new in zip(step.gradients().values(), before, after, strict=True):
        np.testing.assert_allclose(own, old - new, 1e-4, 1e-5)
    state = [name for name in step.out if name not in step.parameters]
    theirs = arrays_of(model.non_trainable_variables).values()
    for name, expected in zip(state, theirs, strict=True):
        np.testing.assert_allclose(step.out[name], expected, 1e-5, 1e-6)


def test_names_depend_on_no_model_that_was_built_before() -> None:
    def build() -> Any:
        return net(layers.Dropout(0.1), layers.Dense(4), layers.Dropout(0.1))

    first, other, second = KerasModel(build), build(), KerasModel(build)
    for kind in ("parameters", "state"):
        same(getattr(first, kind)(1), getattr(second, kind)(1))
    assert "sequential/dense_1/kernel" in first.parameters(1)
    assert build().name != other.name


def test_two_variables_of_one_path_have_two_names() -> None:
    class Twice(keras.Model):
        def __init__(self) -> None:
            super().__init__(name="twice")
            self.parts = [layers.Dense(5, name="part"), layers.Dense(5, name="part")]

        def call(self, x: Any) -> Any:
            return self.parts[1](self.parts[0](x))

    def build() -> Any:
        model = Twice()
        model(X)
        return model

    assert len(KerasModel(build, "mse").parameters(0)) == 4


def test_layers_that_rest_are_frozen_and_stay_as_they_are() -> None:
    def build() -> Any:
        resting = keras.Sequential(
            [keras.Input((4,)), layers.Dense(4), layers.BatchNormalization(), layers.Dropout(0.5)]
        )
        resting.trainable = False
        return net(resting)

    step = Step(build)
    assert len(step.frozen) == 6
    assert [name.split("/")[-1] for name in step.model.state(0)] == ["seed_generator_state"]
    before = {name: value.copy() for name, value in step.frozen.items()}
    step()
    same(step.frozen, before)
    assert step.out.keys() == step.parameters.keys() | step.model.state(0).keys()


def test_output_without_a_loss_trains_nothing() -> None:
    def build() -> Any:
        inputs = keras.Input((5,))
        unused = layers.Dense(2, name="unused")(inputs)
        model = keras.Model(inputs, [layers.Dense(3, name="used")(inputs), unused])
        model.compile("sgd", [keras.losses.SparseCategoricalCrossentropy(from_logits=True), None])
        return model

    step = Step(build)
    step((X, Y, Y))
    assert not step.out["unused/kernel"].any() and step.out["used/kernel"].any()


def _named_outputs() -> Any:
    inputs = keras.Input((5,))
    outputs = {"a": layers.Dense(2)(inputs), "b": layers.Dense(3)(inputs)}
    model = keras.Model(inputs, outputs)
    model.compile("sgd", {"a": "mse", "b": "sparse_categorical_crossentropy"})
    return model


def _one_of_two_outputs() -> Any:
    inputs = keras.Input((5,))
    model = keras.Model(inputs, [layers.Dense(4)(inputs), layers.Dense(3)(inputs)])
    model.compile("sgd", ["sparse_categorical_crossentropy"] * 2)
    return model


LABELLED: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "one output": (net, lambda y: (X, y)),
    "a column": (net, lambda y: (X, y[:, None])),
    "outputs by name": (_named_outputs, lambda y: (X, X[:, :2], y)),
    "the second output": (_one_of_two_outputs, lambda y: (X, Y + 1, y)),
}


@pytest.mark.parametrize("case", LABELLED)
def test_label_of_no_class_is_refused_in_steps_and_evaluations(case: str) -> None:
    build, batch_of = LABELLED[case]
    step = Step(build)
    step(batch_of(Y))
    step.model.metrics(step.values, batch_of(Y))
    error = ConfigError if BACKEND == "jax" else (IndexError, RuntimeError)  # of torch
    for wrong in (Y + 1, Y - 1):
        with pytest.raises(error):
            step(batch_of(wrong))
        with pytest.raises(error):
            step.model.metrics(step.values, batch_of(wrong))


def test_label_of_a_class_that_is_ignored_may_be_any() -> None:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=255)
    step = Step(lambda: net(loss=loss))
    assert step((X, np.where(Y == 2, 255, Y))) < step()
    step((X, np.full_like(Y, 255)))


def test_dropout_has_a_seed_that_is_exact_state_and_rests_in_evaluation() -> None:
    step = Step(lambda: net(layers.Dropout(0.5, seed=3)))
    (name,) = step.model.state(0)
    first = step()
    assert step.out[name].dtype.kind in "iu"
    assert step.out[name].tolist() == [3, 1]
    assert step() == first
    step.values[name] = step.out[name].copy()
    assert step() != first
    measures = [step.model.metrics(step.values, BATCH) for _ in range(2)]
    assert measures[0] == measures[1]


def test_dropout_without_a_seed_is_repeatable() -> None:
    assert len({Step(lambda: net(layers.Dropout(0.5)))() for _ in range(2)}) == 1


class Wavering(keras.Model):
    """Has a train_step of its own."""

    def train_step(self, *data: Any) -> Any:
        return super().train_step(*data)


def wavering() -> Any:
    inputs = keras.Input((5,))
    return Wavering(inputs, layers.Dense(3)(inputs))


REFUSED: dict[str, tuple[Any, ...]] = {
    "no model": (lambda: 7,),
    "a mistake in build": (lambda: net(1 / 0),),
    "no loss": (lambda: keras.Sequential([keras.Input((5,)), layers.Dense(3)]),),
    "no variables yet": (lambda: keras.Sequential([layers.Dense(3)]), "mse"),
    "loss in two places": (net, "mse"),
    "its own train_step": (wavering, "mse"),
    "float16": (lambda: net(layers.Dense(3, dtype="mixed_float16")),),
    "no float32": (lambda: net(layers.Dense(3, dtype="bfloat16")),),
}


def test_model_of_keras_itself_is_refused_with_its_adapter() -> None:
    with pytest.raises(ConfigError, match=r"expected zmqtrain\.adapters\.keras\.KerasModel"):
        Job(model=net(), data=BATCH, optimizer=SGD(0.1))
    torch = pytest.importorskip("zmqtrain.adapters.torch")
    with pytest.raises(ConfigError, match=r"for a model of Keras KerasModel\(build\)"):
        torch.TorchModel(net, print).parameters(0)


@pytest.mark.parametrize("case", REFUSED)
def test_model_that_cannot_be_trained_is_refused(case: str) -> None:
    with pytest.raises(ConfigError):
        KerasModel(*REFUSED[case]).parameters(0)


def test_batch_of_too_many_arrays_or_without_targets_is_refused() -> None:
    with pytest.raises(ConfigError):
        Step()((X, Y, Y, Y))
    with pytest.raises(ConfigError, match="has 2 arrays; expected 2 inputs"):
        KerasModel(branches).metrics({}, (X, X[:, :2]))


def test_model_whose_loss_needs_no_targets_is_given_none() -> None:
    class Own(keras.Model):
        def compute_loss(
            self, x: Any = None, y: Any = None, y_pred: Any = None, *others: Any, **more: Any
        ) -> Any:
            assert y is None
            return keras.ops.mean(keras.ops.square(x - y_pred))

    def build() -> Any:
        inputs = keras.Input((5,))
        model = Own(inputs, layers.Dense(5)(inputs))
        model.compile("sgd", "mse")
        return model

    model = KerasModel(build)
    assert model.metrics(model.parameters(0), (X,))["loss"] > 0


def test_metric_without_data_of_its_own_takes_the_sums_of_another() -> None:
    """As in a chief without validation data."""

    def build() -> Any:
        inputs = keras.Input((5,))
        model = keras.Model(inputs, layers.Dense(5)(inputs))
        model.compile("sgd", "mse", metrics=[keras.metrics.R2Score()])
        return model

    (theirs,), (own,) = KerasModel(build).summed_metrics, KerasModel(build).summed_metrics
    sums = theirs.update(X / 2, (X, X))
    assert own.result(sums) == theirs.result(sums) > 0


class OfOnes(keras.metrics.Mean):
    """The share of right answers among examples of class 1."""

    def update_state(self, y: Any, outputs: Any, sample_weight: Any = None) -> Any:
        best = keras.ops.cast(keras.ops.argmax(outputs, -1), "int32")
        right = keras.ops.equal(best, keras.ops.cast(y, "int32"))
        return super().update_state(right, keras.ops.equal(y, 1))


class Largest(OfOnes):
    def update_state(self, y: Any, outputs: Any, sample_weight: Any = None) -> Any:
        self.total.assign(keras.ops.maximum(self.total.value, keras.ops.max(outputs)))


def measuring(metric: Any) -> Any:
    model = keras.Sequential([keras.Input((5,)), layers.Dense(3, "softmax")])
    model.compile("sgd", "sparse_categorical_crossentropy", metrics=[metric(name="own")])
    return model


def test_mean_of_the_users_own_may_weigh_examples() -> None:
    trainer = zmqtrain.Trainer(KerasModel(partial(measuring, OfOnes)))
    x, y = np.tile(X, (9, 1))[:20], np.arange(20) ** 2 % 3
    right = trainer.predict(x).argmax(axis=1) == y
    found = trainer.evaluate(x, y, batch_size=7)["own"]
    assert found == pytest.approx(right[y == 1].mean())


def test_metric_whose_variables_are_no_sums_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"name='own'.*expected sums"):
        zmqtrain.Trainer(KerasModel(partial(measuring, Largest))).evaluate(X, Y)


def test_loss_that_adds_up_is_for_one_worker() -> None:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    options: dict[str, Any] = {"batch_size": 4, "steps": 2, "policy": "sync-replicas"}
    model = KerasModel(partial(net, loss=loss))
    job = Job(model=model, data=Arrays(BATCH), optimizer=SGD(0.1), **options)
    with pytest.raises(ConfigError, match="adds up"):
        zmqtrain.run(job, workers=2)


def test_model_of_several_inputs_takes_class_weights() -> None:
    def build() -> Any:
        inputs = [keras.Input((5,)), keras.Input((2,))]
        outputs = layers.Dense(3, "softmax")(layers.Concatenate()(inputs))
        model = keras.Model(inputs, outputs)
        model.compile("sgd", "sparse_categorical_crossentropy")
        return model

    def weights(**options: Any) -> list[Any]:
        trainer = zmqtrain.Trainer(KerasModel(build))
        trainer.fit([X, X[:, :2]], Y, batch_size=4, verbose=False, **options)
        return list(trainer.weights.values())

    by_class, by_example = {0: 2.0, 2: 0.0}, np.float32([2, 1, 0])[Y]
    expected = weights(sample_weight=by_example)
    for own, theirs in zip(weights(class_weight=by_class), expected, strict=True):
        np.testing.assert_array_equal(own, theirs)


optimizers, schedules = keras.optimizers, keras.optimizers.schedules
DECAY = schedules.ExponentialDecay(0.1, 2, 0.5, staircase=True)
TWINS = {
    "sgd": lambda: optimizers.SGD(0.1),
    "momentum": lambda: optimizers.SGD(DECAY, momentum=0.9),
    "nesterov": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optimizers.Adam(0.1, 0.8, 0.9, 1e-3),
    "adamw": lambda: optimizers.AdamW(0.1, 0.05, epsilon=1e-2),
    "adam with decay": lambda: optimizers.Adam(0.1, weight_decay=0.05),
    "rmsprop": lambda: optimizers.RMSprop(0.1),
    "centered": lambda: optimizers.RMSprop(0.1, momentum=0.5, centered=True),
    "adagrad": lambda: optimizers.Adagrad(0.1),
    "ftrl": lambda: optimizers.Ftrl(
        0.1, l1_regularization_strength=0.01, l2_regularization_strength=0.1, beta=0.1
    ),
    "lion": lambda: optimizers.Lion(0.1, weight_decay=0.1),
    "lamb": lambda: optimizers.Lamb(0.1),
    "adafactor": lambda: optimizers.Adafactor(0.1),
    "adafactor of a schedule": lambda: optimizers.Adafactor(DECAY, -0.5, 1e-3, 0.1, 0.5),
    "inverse time": lambda: optimizers.SGD(schedules.InverseTimeDecay(0.1, 2, 0.5)),
    "piecewise": lambda: optimizers.SGD(schedules.PiecewiseConstantDecay([1, 3], [0.1, 0.2, 0.3])),
    "polynomial": lambda: optimizers.SGD(schedules.PolynomialDecay(0.1, 3, cycle=True)),
    "cosine": lambda: optimizers.SGD(schedules.CosineDecay(0.1, 4, 0.2)),
    "warm-up": lambda: optimizers.SGD(
        schedules.CosineDecay(0.01, 3, 0.2, warmup_target=0.1, warmup_steps=2)
    ),
    "warm-up to nowhere": lambda: optimizers.SGD(schedules.CosineDecay(0.1, 4, warmup_steps=2)),
    "amsgrad": lambda: optimizers.Adam(0.1, 0.8, 0.5, 1e-3, amsgrad=True),
    "nadam": lambda: optimizers.Nadam(DECAY, 0.8, 0.9, 1e-3),
    "adamax": lambda: optimizers.Adamax(0.1, 0.8, 0.5, 1e-3),
}
OF_SCHEDULES = ("inverse time", "piecewise", "polynomial", "cosine", "warm-up")


@pytest.mark.parametrize("case", TWINS)
def test_optimizer_has_a_twin_that_computes_the_same(case: str) -> None:
    optimizer = TWINS[case]()
    rule = rule_of(optimizer)
    rows: Any = slice(3) if isinstance(rule, MatrixRule) else 0
    variable = keras.Variable(X[rows])
    optimizer.build([variable])
    flat = X[rows].copy()
    slots = new_slots(rule, flat)
    for step in range(5):
        gradient = X[step + 1 :][rows]
        optimizer.apply([keras.ops.convert_to_tensor(gradient)])
        rule.update(flat, gradient, slots, step)
        theirs = keras.ops.convert_to_numpy(variable.value)
        np.testing.assert_allclose(flat, theirs, 2e-5, 2e-6, err_msg=str(step))


TWINLESS = {
    "optimizer": lambda: optimizers.Adadelta(),
    "optimizer of several kinds": lambda: optimizers.Muon(),
    "decay of adafactor": lambda: optimizers.Adafactor(weight_decay=0.1),
    "decay of lamb": lambda: optimizers.Lamb(weight_decay=0.1),
    "average": lambda: optimizers.SGD(use_ema=True),
    "clipping": lambda: optimizers.SGD(clipnorm=1.0),
    "decay": lambda: optimizers.SGD(weight_decay=0.1),
    "schedule": lambda: optimizers.SGD(schedules.CosineDecayRestarts(0.1, 4)),
    "the user's own": lambda: type("SGD", (optimizers.SGD,), {"__module__": "own"})(),
}


@pytest.mark.parametrize(
    ("option", "field"), [("global_clipnorm", "clip_norm"), ("clipvalue", "clip_value")]
)
def test_clipping_of_an_optimizer_is_that_of_the_job(option: str, field: str) -> None:
    limit = {"global_clipnorm": 0.05, "clipvalue": 0.01}[option]
    optimizer = optimizers.SGD(0.5, **{option: limit})
    given = {"data": BATCH, "batch_size": len(X), "steps": 3}
    found = zmqtrain.run(Job(model=KerasModel(net), optimizer=optimizer, **given))
    keras.utils.set_random_seed(0)
    model = net()
    model.compile(optimizers.SGD(0.5, **{option: limit}), model.loss)
    for _ in range(3):
        model.train_on_batch(X, Y)
    for own, variable in zip(found.parameters.values(), model.variables, strict=True):
        np.testing.assert_allclose(own, keras.ops.convert_to_numpy(variable), 1e-5, 1e-6)
    with pytest.raises(ConfigError, match=f"{field} is 7.0, and its optimizer gives {limit}"):
        Job(model=KerasModel(net), optimizer=optimizer, **given, **{field: 7.0})


@pytest.mark.parametrize("case", TWINLESS)
def test_optimizer_without_a_twin_is_refused(case: str) -> None:
    with pytest.raises(ConfigError):
        rule_of(TWINLESS[case]())


def saved(tmp_path: Path, build: Callable[[], Any] = net, **fields: Any) -> Any:
    """Return the logdir of a short training."""
    model = KerasModel(build)
    data = Arrays(train=BATCH, evaluation=BATCH)
    options = {"optimizer": model.optimizer, "batch_size": 6, "steps": 4} | fields
    zmqtrain.run(Job(model=model, data=data, logdir=str(tmp_path), **options))
    return str(tmp_path)


def test_weights_of_a_logdir_fit_a_model_whose_layers_have_other_numbers(tmp_path: Path) -> None:
    def build() -> Any:
        return net(layers.BatchNormalization(), layers.Dense(4))

    weights = zmqtrain.load(saved(tmp_path, build))
    build()
    model = build()
    load_weights(model, tmp_path)
    assert model.layers[0].name not in ("dense", "dense_1", "dense_2")
    loss, accuracy = model.evaluate(X, Y, verbose=0)
    measures = KerasModel(build).metrics(weights, BATCH)
    assert measures == pytest.approx({"loss": loss, "accuracy": accuracy}, rel=1e-5)


def test_weights_of_a_logdir_fit_a_model_that_is_not_compiled(tmp_path: Path) -> None:
    weights = zmqtrain.load(saved(tmp_path))
    model = keras.models.clone_model(net())
    load_weights(model, tmp_path)
    for own, value in zip(model.get_weights(), weights.values(), strict=True):
        np.testing.assert_array_equal(own, value)


def test_layers_whose_names_are_only_numbers_keep_their_own_weights(tmp_path: Path) -> None:
    def build() -> Any:
        return net(layers.Dense(4, name="4"), layers.Dense(4, name="_4"))

    trained, model = zmqtrain.load(saved(tmp_path, build)), build()
    load_weights(model, tmp_path)
    for name in ("4", "_4"):
        kernel = keras.ops.convert_to_numpy(model.get_layer(name).kernel)
        (own,) = (value for key, value in trained.items() if key.endswith(f"/{name}/kernel"))
        np.testing.assert_array_equal(kernel, own)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="do not fit the model"):
        load_weights(net(layers.Dense(4)), saved(tmp_path))


def test_job_begins_with_the_weights_of_a_file_of_keras(tmp_path: Path) -> None:
    model = net()
    path = tmp_path / "x.weights.h5"
    model.save_weights(path)
    values = arrays_of(model.variables).values()
    job = Job(model=KerasModel(net), data=BATCH, optimizer=rule_of(model.optimizer), initial=path)
    for own, theirs in zip(job.all_values().values(), values, strict=True):
        np.testing.assert_array_equal(own, theirs)


@pytest.mark.parametrize("file", ["other.weights.h5", "missing.weights.h5"])
def test_file_of_keras_that_does_not_fit_is_refused(file: str, tmp_path: Path) -> None:
    net(layers.Dense(7)).save_weights(tmp_path / "other.weights.h5")
    with pytest.raises(ConfigError):
        KerasModel(net).read_weights(tmp_path / file)


def binary(**metrics: Any) -> Any:
    model = keras.Sequential([keras.Input((5,)), layers.Dense(1, "sigmoid")])
    model.compile(optimizers.Adam(0.05), "binary_crossentropy", **metrics)
    return model


def summed() -> Any:
    of_all = [keras.metrics.AUC(name="auc"), keras.metrics.RootMeanSquaredError(name="root")]
    return binary(metrics=[*of_all, "mae", "accuracy"])


def weighted() -> Any:
    metrics = [keras.metrics.AUC(name="auc"), keras.metrics.BinaryAccuracy(name="right")]
    return binary(weighted_metrics=metrics)


def named(is_dict: bool) -> Any:
    """Return a model of two inputs and two outputs, whose names are not in the order of letters."""
    inputs = {"b": keras.Input((5,), name="b"), "a": keras.Input((2,), name="a")}
    joined = layers.Concatenate()([layers.Dense(4, "relu")(one) for one in inputs.values()])
    outputs = {"q": layers.Dense(1, "sigmoid", name="q")(joined), "p": layers.Dense(2, name="p")}
    outputs["p"] = outputs["p"](joined)
    if not is_dict:
        inputs, outputs = list(inputs.values()), list(outputs.values())
    model = keras.Model(inputs, outputs)
    losses, metrics = {"q": "binary_crossentropy", "p": "mse"}, {"q": ["AUC"], "p": ["mae"]}
    model.compile("adam", losses, metrics=metrics)
    return model


YES = (X[:, :1] > 0).astype(np.float32)
NAMED: Any = ({"b": X, "a": X[:, :2]}, {"q": YES, "p": X[:, 1:3]})
MEASURED: dict[str, tuple[Callable[[], Any], Any]] = {
    "sums": (summed, (X, YES)),
    "weighted": (weighted, (X, YES, np.arange(12, dtype=np.float32))),
    "by name": (partial(named, True), NAMED),
    "in order": (partial(named, False), tuple([*given.values()] for given in NAMED)),
}


def evaluated_by_keras(trainer: Any, build: Any, examples: Any, size: int = 32) -> dict[str, Any]:
    """Return what Keras itself measures with the trainer's weights."""
    model = build()
    load_weights(model, trainer.weights)
    x, y, *weights = examples
    sample_weight = weights[0] if weights else None
    measures: dict[str, Any] = model.evaluate(x, y, size, 0, sample_weight, return_dict=True)
    return measures


@pytest.mark.parametrize("case", MEASURED)
def test_trainer_measures_and_predicts_as_keras_does(case: str) -> None:
    build, examples = MEASURED[case]
    trainer = zmqtrain.Trainer(KerasModel(build))
    options = {"validation_data": examples, "verbose": False}
    history = trainer.fit(examples, epochs=2, batch_size=4, **options).history
    expected = evaluated_by_keras(trainer, build, examples)
    assert trainer.evaluate(examples, batch_size=5) == pytest.approx(expected, rel=1e-4)
    assert {f"val_{name}" for name in expected} <= history.keys()
    if "p_loss" in history:
        assert history["loss"] == pytest.approx(np.add(history["p_loss"], history["q_loss"]))
    model = build()
    load_weights(model, trainer.weights)
    theirs = keras.tree.flatten(model.predict(examples[0], verbose=0))
    own = keras.tree.flatten(trainer.predict(examples[0], batch_size=5))
    for one, other in zip(own, theirs, strict=True):
        np.testing.assert_allclose(one, other, 1e-5)


def test_model_is_built_for_its_steps_and_once_more_for_initial_values() -> None:
    built = []

    def build() -> Any:
        built.append(summed())
        return built[-1]

    trainer = zmqtrain.Trainer(KerasModel(build))
    for _ in range(3):
        trainer.fit(X, YES, verbose=False)
        trainer.evaluate(X, YES)
    assert len(built) <= 2


def test_job_takes_optimizer_and_summed_metrics_of_the_compiled_model() -> None:
    model = KerasModel(summed)
    job = Job(model=model, data=(X, YES))
    assert job.optimizer == rule_of(model.optimizer)
    assert [metric.name for metric in job.metrics] == ["auc", "root"]
    with pytest.raises(ConfigError, match=r"optimizer is None; .*zmqtrain\.optim has them"):
        zmqtrain.Trainer(KerasModel(lambda: net(optimizer=None))).fit(X, YES)


def test_inputs_of_another_name_are_refused() -> None:
    with pytest.raises(DataError, match="arrays have the names other"):
        zmqtrain.Trainer(KerasModel(partial(named, True))).predict({"other": X})


WORDS = np.random.default_rng(3).integers(1, 9, (22, 6))
WORDS[:, 3:][np.random.default_rng(4).random((22, 3)) < 0.6] = 0
TAGS = np.arange(132).reshape(22, 6) % 3
WORD_WEIGHTS = np.linspace(0.1, 2, 22).astype(np.float32)


def tagger(kind: str = "embedding", outputs: int = 1) -> Any:
    """Return a model of a class for each word, of which those that are 0 are masked."""
    words = keras.Input((6,), dtype="int32")
    if kind == "embedding":
        found = layers.Embedding(9, 4, mask_zero=True)(words)
    else:
        column = layers.Reshape((6, 1))(words)
        found = layers.Masking()(layers.Rescaling(0.2)(column))
    tags = layers.Dense(3, "softmax", name="tags")(found)
    measures = ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2, name="top")]
    weighted = ["accuracy", keras.metrics.SparseCategoricalAccuracy(name="right")]
    loss, given = "sparse_categorical_crossentropy", (measures, weighted)
    if outputs == 1:
        model = keras.Model(words, tags)
        model.compile("sgd", loss, metrics=measures, weighted_metrics=weighted)
        return model
    size = layers.Dense(1, name="size")(layers.GlobalMaxPooling1D()(layers.Dense(2)(found[:, :2])))
    model = keras.Model(words, {"tags": tags, "size": size})
    losses = {"tags": loss, "size": "mse"}
    of_output = [{"tags": one, "size": ["mae"]} for one in given]
    model.compile("sgd", losses, metrics=of_output[0], weighted_metrics=of_output[1])
    return model


@pytest.mark.parametrize(
    ("build", "weights"),
    [
        (tagger, ()),
        (tagger, (np.outer(WORD_WEIGHTS, WORD_WEIGHTS[:6]),)),
        (partial(tagger, "layer"), ()),
        (partial(tagger, outputs=2), ()),
    ],
    ids=["embedding", "weights", "layer", "outputs"],
)
def test_words_that_are_masked_are_not_measured(build: Any, weights: Any) -> None:
    trainer = zmqtrain.Trainer(KerasModel(build))
    labels: Any = TAGS
    if len(trainer.model.module.outputs) == 2:
        labels = {"tags": TAGS, "size": WORD_WEIGHTS[:, None]}
    examples = (WORDS, labels, *weights)

    def check(measures: Any, expected: Any, prefix: str = "") -> None:
        own = {name: value for name, value in expected.items() if "loss" not in name}
        found = {name: measures[prefix + name] for name in own}
        assert found == pytest.approx(own, rel=1e-5)

    before = evaluated_by_keras(trainer, build, examples, 22)
    for batch_size in (22, 9):
        check(trainer.evaluate(examples, batch_size=batch_size), before)
    options = {"validation_data": examples, "verbose": False, "batch_size": 22}
    history = trainer.fit(examples, **options).history
    measures = {name: values[0] for name, values in history.items()}
    check(measures, before)
    check(measures, evaluated_by_keras(trainer, build, examples, 22), "val_")
    outputs = trainer.predict(WORDS, batch_size=5)
    assert all(type(one) is np.ndarray for one in keras.tree.flatten(outputs))


def test_metric_of_zmqtrain_leaves_out_what_keras_masks() -> None:
    trainer = zmqtrain.Trainer(KerasModel(tagger), metrics=[Accuracy(name="own")])
    counts = WORDS != 0
    right = (trainer.predict(WORDS).argmax(-1) == TAGS)[counts]
    measures = trainer.evaluate((WORDS, TAGS), batch_size=7)
    assert measures["own"] == pytest.approx(np.mean(right))


def test_metrics_of_a_model_with_an_unknown_mask_are_refused_by_name() -> None:
    class Tagger(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.line = layers.Embedding(9, 4, mask_zero=True), layers.Dense(3)

        def call(self, words: Any) -> Any:
            return self.line(self.embed(words))

    def build() -> Any:
        model = Tagger()
        model(WORDS)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, metrics=["accuracy"])
        return model

    trainer = zmqtrain.Trainer(KerasModel(build))
    with pytest.raises(ConfigError, match=r"accuracy would be measured without it.*keras\.Input"):
        trainer.evaluate((WORDS, TAGS))
    with pytest.raises(ConfigError, match="accuracy would be measured"):
        trainer.fit((WORDS, TAGS), batch_size=11, verbose=False)


@pytest.mark.parametrize("options", [{"class_weight": {0: 2.0}}, {"metrics": [Accuracy()]}])
def test_class_weights_and_metrics_of_zmqtrain_need_a_model_of_one_output(options: Any) -> None:
    weight = {"class_weight": options.pop("class_weight")} if "class_weight" in options else {}
    trainer = zmqtrain.Trainer(KerasModel(branches), **options)
    with pytest.raises(ConfigError, match="has several outputs"):
        trainer.fit([X, X[:, :2]], [X[:, :1], X[:, :2]], batch_size=4, verbose=False, **weight)


def test_labels_are_behind_the_inputs_of_the_model() -> None:
    def build() -> Any:
        inputs = [keras.Input((1,), name=name) for name in ("user", "item")]
        model = keras.Model(inputs, layers.Dense(1)(layers.Add()(inputs)))
        model.compile("sgd", "mse", metrics=["mae"])
        return model

    users, items = np.arange(12)[:, None], np.arange(12)[:, None] + 90
    ratings = np.linspace(1, 5, 12, dtype=np.float32)
    own = MeanAbsoluteError(name="own")
    trainer = zmqtrain.Trainer(KerasModel(build), metrics=[own])
    measures = trainer.evaluate(([users, items], ratings), batch_size=5)
    outputs = trainer.predict([users, items])
    assert measures["own"] == pytest.approx(np.mean(abs(outputs[:, 0] - ratings)), rel=1e-5)


@pytest.mark.parametrize("kind", ["acceleration", "score"])
def test_callback_of_mode_auto_follows_the_direction_of_keras(kind: str) -> None:
    def build() -> Any:
        inputs = keras.Input((5,))
        names = ("acceleration", "speed")
        if kind == "acceleration":
            heads = {name: layers.Dense(1, name=name)(inputs) for name in names}
            model = keras.Model(inputs, heads)
            metrics = {name: ["mae"] for name in names}
            model.compile("sgd", dict.fromkeys(names, "mse"), metrics=metrics)
            return model
        model = keras.Model(inputs, layers.Dense(3, "softmax")(inputs))
        score = keras.metrics.F1Score("macro", name="score")
        model.compile("sgd", "mse", metrics=[score, keras.metrics.CosineSimilarity(name="like")])
        return model

    labels: Any = np.eye(3, dtype=np.float32)[Y]
    best: Any = max
    followed = ["val_score", "val_like"]
    if kind == "acceleration":
        labels, best = {"acceleration": X[:, :1], "speed": X[:, 1:2]}, min
        followed = ["val_acceleration_loss", "val_acceleration_mae"]
    callbacks = [EarlyStopping(name, patience=9) for name in followed]
    data = {"validation_data": (X, labels), "verbose": False, "epochs": 3, "batch_size": 4}
    history = zmqtrain.Trainer(KerasModel(build)).fit(X, labels, callbacks=callbacks, **data)
    for callback in callbacks:
        assert callback.best == best(history.history[callback.monitor])


@pytest.mark.parametrize("name", ["EarlyStopping", "ModelCheckpoint", "ReduceLROnPlateau"])
def test_callback_of_keras_that_follows_an_unknown_measure_is_refused(
    name: str, tmp_path: Path
) -> None:
    more = {"filepath": tmp_path / "x.keras", "save_best_only": True} if "Model" in name else {}
    callback = getattr(keras.callbacks, name)(monitor="val_acc", mode="max", **more)
    trainer = zmqtrain.Trainer(KerasModel(net))
    with pytest.raises(ConfigError, match="'val_acc', which is not measured"):
        trainer.fit(BATCH, validation_data=BATCH, callbacks=[callback], verbose=False)
    with pytest.raises(ConfigError, match=r"not measured; .*; give data to evaluate on"):
        trainer.fit(BATCH, callbacks=[callback], verbose=False)


def test_callbacks_of_keras_work_in_fit(tmp_path: Path) -> None:
    callbacks, epochs = keras.callbacks, []
    whole, parts = tmp_path / "{epoch}.keras", tmp_path / "best.weights.h5"
    stop = callbacks.EarlyStopping("val_accuracy", patience=1, restore_best_weights=True)
    trainer = zmqtrain.Trainer(KerasModel(net), SGD(0.0))
    history = trainer.fit(
        BATCH,
        epochs=5,
        batch_size=4,
        validation_data=BATCH,
        callbacks=[
            stop,
            callbacks.ModelCheckpoint(str(whole)),
            callbacks.ModelCheckpoint(
                str(parts), "val_accuracy", save_best_only=True, save_weights_only=True
            ),
            callbacks.CSVLogger(str(tmp_path / "log.csv")),
            callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: epochs.append(epoch)),
            callbacks.LearningRateScheduler(lambda epoch, rate: 0.0),
        ],
        verbose=False,
    )
    assert (epochs, stop.stopped_epoch, len(history.epoch)) == ([0, 1], 1, 2)
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 3
    loaded = keras.models.load_model(tmp_path / "2.keras")
    other = net()
    other.load_weights(parts)
    for model in (loaded, other):
        for own, theirs in zip(trainer.weights.values(), model.get_weights(), strict=True):
            np.testing.assert_array_equal(own, theirs)


@pytest.mark.parametrize("workers", [1, 2])
def test_callback_of_a_third_party_looks_at_the_model_as_it_is_then(
    workers: int, tmp_path: Path
) -> None:
    seen: list[Any] = []

    class Look(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            model = self.model
            loss, accuracy = model.evaluate(*BATCH, verbose=0)
            assert (loss, accuracy) == pytest.approx((logs["val_loss"], logs["val_accuracy"]))
            seen.append((model.predict(X, verbose=0), model.layers[0].get_weights()[0]))
            assert model.optimizer.get_config() == {"learning_rate": pytest.approx(0.1)}
            model.save_weights(filepath=tmp_path / f"{epoch}.weights.h5")

        def on_train_end(self, logs: Any = None) -> None:
            assert np.abs(self.model.predict(X, verbose=0) - seen[0][0]).max() > 1e-3
            self.model.load_weights(filepath=tmp_path / "0.weights.h5")
            np.testing.assert_allclose(self.model.predict(X, verbose=0), seen[0][0], 1e-5)

    trainer = zmqtrain.Trainer(KerasModel(net), SGD(0.1), workers=workers)
    options = {"batch_size": 4, "validation_data": BATCH, "verbose": False}
    trainer.fit(BATCH, epochs=2, callbacks=[Look()], **options)
    assert np.abs(seen[0][0] - seen[1][0]).max() > 1e-3
    np.testing.assert_array_equal(trainer.weights["sequential/dense/kernel"], seen[0][1])


@pytest.mark.parametrize("name", ["compile", "fit", "_initial_epoch", "such"])
def test_callback_cannot_train_a_model_by_itself(name: str) -> None:
    view = ModelView(KerasModel(net))
    view.show(KerasModel(net).parameters(0))
    assert not hasattr(view, name) and view.name == "sequential"


class OwnBackup(keras.callbacks.BackupAndRestore):
    pass


@pytest.mark.parametrize(
    ("callback", "twin"),
    [
        (lambda path: keras.callbacks.BackupAndRestore(path), "logdir"),
        (lambda path: keras.callbacks.SwapEMAWeights(), "moving_average"),
        (lambda path: keras.callbacks.TensorBoard(path), "zmqtrain.callbacks.TensorBoard"),
        (lambda path: OwnBackup(path), "logdir"),
    ],
)
def test_callback_that_needs_the_training_of_keras_is_refused_with_its_twin(
    callback: Any, twin: str, tmp_path: Path
) -> None:
    trainer = zmqtrain.Trainer(KerasModel(net), SGD(0.1))
    with pytest.raises(ConfigError, match=twin):
        trainer.fit(BATCH, batch_size=4, callbacks=[callback(str(tmp_path / "x"))], verbose=False)


@pytest.mark.parametrize("case", [name for name in TWINS if name not in OF_SCHEDULES])
def test_keras_goes_on_from_a_training_as_zmqtrain_does(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def build() -> Any:
        return net(optimizer=TWINS[case]())

    def fit(epochs: int) -> dict[str, Any]:
        options: dict[str, Any] = {"policy": "sync-replicas", "logdir": str(tmp_path)}
        trainer = zmqtrain.Trainer(KerasModel(build), workers=2, **options)
        write = keras.callbacks.ModelCheckpoint(str(tmp_path / "{epoch}.keras"))
        trainer.fit(BATCH, epochs=epochs, batch_size=6, callbacks=[write], verbose=False)
        return trainer.weights

    fit(3)
    loaded = build()
    load_weights(loaded, tmp_path)
    expected = fit(6).values()
    assert not [text for text in caplog.messages if "optimizer" in text]
    for model in (keras.models.load_model(tmp_path / "3.keras"), loaded):
        for _ in range(3):
            model.train_on_batch(*BATCH)
        for own, theirs in zip(model.get_weights(), expected, strict=True):
            np.testing.assert_allclose(own, theirs, 1e-5, 2e-6)


def test_job_with_an_optimizer_that_has_trained_warns_of_its_state(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = net(optimizer="adam")
    model.train_on_batch(*BATCH)
    Job(model=KerasModel(net), data=BATCH, optimizer=model.optimizer)
    assert "a new Adam, without its state after 1 update;" in caplog.text


def test_keras_goes_on_with_what_callbacks_have_set(tmp_path: Path) -> None:
    class Zeros(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.set_weights([0 * value for value in self.model.get_weights()])

    trainer = zmqtrain.Trainer(KerasModel(partial(net, optimizer="adam")), logdir=str(tmp_path))
    halve = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    write = keras.callbacks.ModelCheckpoint(str(tmp_path / "x.keras"))
    trainer.fit(BATCH, epochs=2, callbacks=[halve, Zeros(), write], verbose=False)
    model = net(optimizer="adam")
    load_weights(model, tmp_path)
    for each in (model, keras.models.load_model(tmp_path / "x.keras")):
        assert float(each.optimizer.learning_rate) == pytest.approx(0.00025)
        assert int(each.optimizer.iterations) and each.optimizer.variables[2].numpy().any()
        assert not any(value.any() for value in each.get_weights())


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"optimizer": SGD(0.1)},
            "Update(rule=SGD(learning_rate=0.1), l2=0.0, moving_average=None) in training",
        ),
        ({"l2": 0.1}, "l2=0.1 in training, l2=0.0 in the model"),
        ({"clip_norm": 1.0}, "clip_norm: 1.0 in training"),
        ({"clip_norm_each": 1.0}, "clip_norm_each: 1.0 in training"),
        ({"policy": "local-steps:2"}, "under local steps"),
    ],
)
def test_optimizer_that_cannot_go_on_as_in_training_begins_anew(
    fields: dict[str, Any], text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = net(optimizer="adam")
    load_weights(model, saved(tmp_path, partial(net, optimizer="adam"), **fields))
    (warning,) = (each for each in caplog.messages if "begins anew" in each)
    assert text in warning
    assert not int(model.optimizer.iterations)


def test_file_without_the_optimizers_state_is_written_and_warned_of_once_for_each_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = KerasModel(net)
    weights = model.parameters(0)

    def fails(error: Exception) -> Any:
        raise error

    full: Any = lambda *_: fails(OSError("no space"))  # noqa: E731
    given = [
        ("a.keras", None, "between epochs alone, not on_steps"),
        ("b.weights.h5", None, ""),
        ("c.keras", None, ""),
        ("d.keras", full, "no space"),
        ("e.keras", lambda *_: fails(RefusedError("not initialised")), "not initialised"),
        ("f.keras", lambda check, _: check("local-steps:2", {}), "under local steps"),
        ("g.keras", full, ""),
    ]
    for name, at, reason in given:
        caplog.clear()
        model.save(tmp_path / name, weights, at)
        assert (tmp_path / name).exists()
        assert reason in caplog.text if reason else not caplog.messages


def test_other_backends_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keras.backend, "backend", lambda: "numpy")
    monkeypatch.delitem(sys.modules, KerasModel.__module__)
    with pytest.raises(ConfigError, match="Keras has its backend numpy; expected torch or jax"):
        importlib.import_module(KerasModel.__module__)


class Assigning(layers.Layer):
    """Assigns a weight of a part that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.base = layers.Dense(3)

    def build(self, shape: Any) -> None:
        self.base.build(shape)
        self.base.trainable = False

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.base.kernel.assign(self.base.kernel * 0.5)
        return self.base(x)


def test_frozen_variable_that_a_step_assigns_is_named() -> None:
    step = Step(lambda: net(Assigning()))
    with pytest.raises(
        ConfigError, match=r"base/kernel', which is frozen|kernel', which is frozen"
    ):
        step()
