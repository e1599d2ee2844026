from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from zmqtrain.errors import ConfigError
from zmqtrain.models import MLP, LinearRegression


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


def test_linear_regression_starts_at_zero() -> None:
    assert all(not value.any() for value in LinearRegression(3, 2).parameters(5).values())


def test_same_seed_gives_the_same_parameters_and_another_seed_others() -> None:
    one, same, other = (MLP(8, (6, 4), 3).parameters(seed) for seed in (1, 1, 2))
    for name in one:
        np.testing.assert_array_equal(one[name], same[name])
    assert not np.array_equal(one["layer0/weights"], other["layer0/weights"])


def test_weights_are_drawn_one_variable_after_another() -> None:
    random = np.random.Generator(np.random.PCG64(7))
    parameters = MLP(8, 6, 3).parameters(7)
    for name, fan_in in (("layer0/weights", 8), ("layer1/weights", 6)):
        drawn = random.standard_normal(parameters[name].shape, np.float32)
        np.testing.assert_allclose(parameters[name], drawn * np.sqrt(2 / fan_in), rtol=1e-6)


def test_mlp_weights_have_the_deviation_of_he_and_biases_are_zero() -> None:
    parameters = MLP(400, (300,), 10).parameters(0)
    assert parameters["layer0/weights"].std() == pytest.approx(np.sqrt(2 / 400), rel=0.02)
    assert parameters["layer1/weights"].std() == pytest.approx(np.sqrt(2 / 300), rel=0.05)
    assert not parameters["layer0/bias"].any()
    assert not parameters["layer1/bias"].any()


@pytest.mark.parametrize("hidden", [64, (64,), [64]])
def test_mlp_of_one_hidden_width_is_the_same_however_it_is_given(hidden: Any) -> None:
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
