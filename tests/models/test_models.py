"""The built-in models: what they begin with, their losses, gradients and measures."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import numpy as np
import pytest

from zmqtrain.errors import ConfigError
from zmqtrain.models import MLP, LinearRegression

ROWS = 7

MODELS = [
    LinearRegression(),
    LinearRegression(features=3, outputs=2),
    MLP(features=4, hidden=(), classes=3),
    MLP(features=4, hidden=5, classes=3),
    MLP(features=4, hidden=(6, 5), classes=3),
]
every_model = pytest.mark.parametrize("model", MODELS, ids=repr)


def random_parameters(model: Any, dtype: type = np.float64) -> dict[str, Any]:
    """Values away from zero, so that no gradient is trivially right."""
    random = np.random.default_rng(1)
    return {
        name: random.normal(0, 0.7, value.shape).astype(dtype)
        for name, value in model.parameters(0).items()
    }


def random_batch(model: Any, rows: int = ROWS, dtype: type = np.float64) -> tuple[Any, ...]:
    random = np.random.default_rng(2)
    features = random.normal(0, 1, (rows, model.features)).astype(dtype)
    if isinstance(model, LinearRegression):
        return features, random.normal(0, 1, (rows, model.outputs)).astype(dtype)
    return features, random.integers(0, model.classes, rows)


def unwritten(parameters: dict[str, Any]) -> dict[str, Any]:
    return {name: np.full_like(value, np.nan) for name, value in parameters.items()}


def reference_loss(model: Any, parameters: dict[str, Any], batch: tuple[Any, ...]) -> float:
    """The loss as the textbook writes it, in float64."""
    features, answers = batch
    values = [np.asarray(value, np.float64) for value in parameters.values()]
    activation = np.asarray(features, np.float64)
    for weights, bias in zip(values[:-2:2], values[1:-2:2], strict=True):
        activation = np.clip(activation @ weights + bias, 0, None)
    result = activation @ values[-2] + values[-1]
    if isinstance(model, LinearRegression):
        return float(np.mean((result - answers) ** 2))
    probabilities = np.exp(result) / np.exp(result).sum(axis=1, keepdims=True)
    return float(-np.log(probabilities[np.arange(len(answers)), answers]).mean())


def reference_gradients(
    model: Any, parameters: dict[str, Any], batch: tuple[Any, ...], width: float = 1e-6
) -> dict[str, Any]:
    """Central differences of the reference loss."""
    gradients = unwritten(parameters)
    for name, value in parameters.items():
        for index in np.ndindex(value.shape):
            losses = []
            for shift in (-width, width):
                shifted = {key: array.copy() for key, array in parameters.items()}
                shifted[name][index] += shift
                losses.append(reference_loss(model, shifted, batch))
            gradients[name][index] = (losses[1] - losses[0]) / (2 * width)
    return gradients


@every_model
def test_gradients_agree_with_central_differences(model: Any) -> None:
    parameters, batch = random_parameters(model), random_batch(model)
    gradients = unwritten(parameters)
    loss = model.loss_and_gradients(parameters, batch, gradients)
    assert loss == pytest.approx(reference_loss(model, parameters, batch), rel=1e-12)
    assert model.metrics(parameters, batch)["loss"] == pytest.approx(loss, rel=1e-12)
    for name, expected in reference_gradients(model, parameters, batch).items():
        np.testing.assert_allclose(gradients[name], expected, rtol=1e-7, atol=1e-8, err_msg=name)


@every_model
def test_float32_step_agrees_with_float64_step(model: Any) -> None:
    parameters, batch = random_parameters(model, np.float32), random_batch(model, dtype=np.float32)
    wide = {name: value.astype(np.float64) for name, value in parameters.items()}
    gradients, wide_gradients = unwritten(parameters), unwritten(wide)
    loss = model.loss_and_gradients(parameters, batch, gradients)
    wide_loss = model.loss_and_gradients(wide, random_batch(model), wide_gradients)
    assert type(loss) is float
    assert loss == pytest.approx(wide_loss, rel=1e-5)
    for name, gradient in gradients.items():
        assert gradient.dtype == np.float32
        np.testing.assert_allclose(gradient, wide_gradients[name], rtol=1e-4, atol=1e-5)


@every_model
def test_repeated_steps_of_changing_batch_size_agree_with_a_fresh_model(model: Any) -> None:
    parameters = random_parameters(model)
    for rows in (3, 7, 7, 3, 1):
        batch = random_batch(model, rows)
        gradients, expected = unwritten(parameters), unwritten(parameters)
        loss = model.loss_and_gradients(parameters, batch, gradients)
        assert loss == copy.deepcopy(model).loss_and_gradients(parameters, batch, expected)
        for name in parameters:
            np.testing.assert_array_equal(gradients[name], expected[name])


@every_model
def test_step_leaves_parameters_and_batch_as_they_were(model: Any) -> None:
    parameters, batch = random_parameters(model), random_batch(model)
    for array in (*parameters.values(), *batch):
        array.flags.writeable = False
    model.loss_and_gradients(parameters, batch, unwritten(parameters))
    model.metrics(parameters, batch)


@every_model
def test_non_finite_parameters_give_non_finite_results_without_a_warning(model: Any) -> None:
    parameters, batch = random_parameters(model, np.float32), random_batch(model, dtype=np.float32)
    for value in parameters.values():
        value.fill(np.inf)
    assert not np.isfinite(model.loss_and_gradients(parameters, batch, unwritten(parameters)))
    assert not np.isfinite(model.metrics(parameters, batch)["loss"])


@every_model
def test_model_survives_copy_and_pickle_after_a_step(model: Any) -> None:
    parameters, batch = random_parameters(model), random_batch(model)
    model.loss_and_gradients(parameters, batch, unwritten(parameters))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin == model
        assert hash(twin) == hash(model)
        assert repr(twin) == repr(model)
        assert twin.metrics(parameters, batch) == model.metrics(parameters, batch)


def test_threads_sharing_one_model_do_not_share_its_scratch() -> None:
    model = MLP(features=4, hidden=(16, 16), classes=3)
    parameters = random_parameters(model)
    batches = [tuple(a + i for a in random_batch(model)[:1]) for i in range(4)]
    labels = random_batch(model)[1]
    expected = [reference_loss(model, parameters, (*batch, labels)) for batch in batches]
    wrong: list[float] = []

    def steps(number: int) -> None:
        out, batch = unwritten(parameters), (*batches[number], labels)
        losses = [model.loss_and_gradients(parameters, batch, out) for _ in range(200)]
        losses += [model.metrics(parameters, batch)["loss"] for _ in range(50)]
        wrong.extend(loss for loss in losses if abs(loss - expected[number]) > 1e-9)

    threads = [threading.Thread(target=steps, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_huge_logits_give_a_finite_loss_and_gradient() -> None:
    model = MLP(1, (), 2)
    parameters = {
        "layer0/weights": np.array([[1e4, -1e4]], np.float32),
        "layer0/bias": np.zeros(2, np.float32),
    }
    out = unwritten(parameters)
    batch = np.ones((1, 1), np.float32), np.array([1])
    assert model.loss_and_gradients(parameters, batch, out) == 2e4
    np.testing.assert_array_equal(out["layer0/bias"], [1, -1])


def test_targets_without_a_second_axis_count_as_one_output() -> None:
    model = LinearRegression(features=2)
    parameters, (features, targets) = random_parameters(model), random_batch(model)
    column, flat = unwritten(parameters), unwritten(parameters)
    assert model.loss_and_gradients(parameters, (features, targets), column) == (
        model.loss_and_gradients(parameters, (features, targets[:, 0]), flat)
    )
    for name in parameters:
        np.testing.assert_array_equal(column[name], flat[name])


FEATURES = np.zeros((3, 4))
LABELS = np.zeros(3, np.int64)


@pytest.mark.parametrize("method", ["loss_and_gradients", "metrics"])
@pytest.mark.parametrize(
    ("model", "batch", "text"),
    [
        (MLP(4, 5, 3), (FEATURES,), "batches of 1 array; expected 2"),
        (MLP(64, 5, 3), (FEATURES, LABELS), r"features of shape (3, 4); .* expects (n, 64)"),
        (MLP(4, (), 3), (FEATURES, LABELS[:2]), r"(3, 4) and labels of shape (2,); .* each row"),
        (MLP(4, 5, 3), (FEATURES, LABELS + 3), "labels from 3 to 3; .* 3 classes .* 0 to 2"),
        (MLP(4, (), 2), (FEATURES, LABELS - 1), "labels from -1 to -1; .* 2 classes .* 0 to 1"),
        (MLP(4, (), 3), (FEATURES, np.zeros((3, 3))), r"(3, 3) and dtype float64; .* argmax"),
        (LinearRegression(4, 1), (FEATURES, np.zeros((3, 2))), r"(3, 2); .* expects (3, 1)"),
    ],
)
def test_batch_that_does_not_fit_is_refused_with_both_sides_named(
    model: Any, batch: tuple[Any, ...], text: str, method: str
) -> None:
    parameters = model.parameters(0)
    arguments = (unwritten(parameters),) if method == "loss_and_gradients" else ()
    with pytest.raises(ConfigError, match=text.replace("(", r"\(").replace(")", r"\)")):
        getattr(model, method)(parameters, batch, *arguments)


def test_classifier_of_known_logits_has_known_metrics() -> None:
    logits = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8], [0.2, 0.6, 0.2]]))
    parameters = {"layer0/weights": np.eye(3), "layer0/bias": np.zeros(3)}
    metrics = MLP(3, (), 3).metrics(parameters, (logits, np.array([0, 2, 0])))
    assert metrics == {
        "loss": pytest.approx(-np.log([0.5, 0.8, 0.2]).mean()),
        "accuracy": pytest.approx(2 / 3),
    }
    assert {type(value) for value in metrics.values()} == {float}


@pytest.mark.parametrize(
    ("model", "shapes"),
    [
        (LinearRegression(), {"weights": (1, 1), "bias": (1,)}),
        (LinearRegression(3, 2), {"weights": (3, 2), "bias": (2,)}),
        (MLP(4, (), 3), {"layer0/weights": (4, 3), "layer0/bias": (3,)}),
        (
            MLP(8, (6, 4), 3),
            {
                "layer0/weights": (8, 6),
                "layer0/bias": (6,),
                "layer1/weights": (6, 4),
                "layer1/bias": (4,),
                "layer2/weights": (4, 3),
                "layer2/bias": (3,),
            },
        ),
    ],
    ids=repr,
)
def test_parameters_are_float32_in_creation_order(model: Any, shapes: dict[str, Any]) -> None:
    parameters = model.parameters(0)
    assert list(parameters) == list(shapes)
    assert {name: value.shape for name, value in parameters.items()} == shapes
    assert {value.dtype for value in parameters.values()} == {np.dtype(np.float32)}
    assert all(type(value) is np.ndarray for value in parameters.values())


def test_weights_are_drawn_one_variable_after_another_and_all_else_is_zero() -> None:
    random = np.random.Generator(np.random.PCG64(7))
    parameters = MLP(8, 6, 3).parameters(7)
    for name, fan_in in (("layer0/weights", 8), ("layer1/weights", 6)):  # as He et al. have it
        drawn = random.standard_normal(parameters[name].shape, np.float32)
        np.testing.assert_allclose(parameters[name], drawn * np.sqrt(2 / fan_in), rtol=1e-6)
    others = [parameters["layer0/bias"], *LinearRegression(3, 2).parameters(7).values()]
    assert not any(value.any() for value in others)


@pytest.mark.parametrize("hidden", [64, (64,), [64]])
def test_hidden_width_may_be_a_number_or_a_sequence(hidden: Any) -> None:
    model = MLP(8, hidden, 10)
    assert model == MLP(8, 64, 10)
    assert hash(model) == hash(MLP(8, 64, 10))
    assert repr(model) == "MLP(features=8, hidden=(64,), classes=10)"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LinearRegression(features=0), "LinearRegression: features is 0"),
        (lambda: LinearRegression(outputs=-1), "LinearRegression: outputs is -1"),
        (lambda: MLP(4, (), 0), "MLP: classes is 0"),
        (lambda: MLP(0, 5, 3), "MLP: features is 0"),
        (lambda: MLP(4, (5, 0), 3), "MLP: hidden is 0"),
        (lambda: MLP(4, 2.5, 3), "MLP: hidden is 2.5"),  # type: ignore[arg-type]
        (lambda: MLP(4, "64", 3), "MLP: hidden is '6'"),  # type: ignore[arg-type]
    ],
)
def test_size_that_is_no_positive_int_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    name = message.split()[1]
    assert str(caught.value) == f"{message}; expected an int of at least 1; correct {name}"
