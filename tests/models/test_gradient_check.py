"""The check of one step: wrong gradients are reported, right ones are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from zmqtrain.models import MLP, LinearRegression
from zmqtrain.models.gradient_check import mistakes_of_a_step

RANDOM = np.random.default_rng(0)
FEATURES = RANDOM.normal(size=(40, 6)).astype(np.float32)
LABELS = RANDOM.integers(0, 3, 40)
SECOND = "layer1/weights"


class Changed:
    """An MLP whose gradient is changed before it is handed over."""

    def __init__(self, change: Callable[[Any, dict[str, Any]], object]) -> None:
        self.network = MLP(features=6, hidden=8, classes=3)
        self._change = change

    def parameters(self, seed: int) -> dict[str, Any]:
        return self.network.parameters(seed)

    def loss_and_gradients(self, parameters: Any, batch: Any, out: Any) -> float:
        loss = self.network.loss_and_gradients(parameters, batch, out)
        self._change(parameters, out)
        return loss

    def metrics(self, parameters: Any, batch: Any) -> dict[str, float]:
        return self.network.metrics(parameters, batch)


class SinglePrecision(Changed):
    """Computes in float32, whatever it is given."""

    def loss_and_gradients(self, parameters: Any, batch: Any, out: Any) -> float:
        single = {name: value.astype(np.float32) for name, value in parameters.items()}
        buffers = {name: np.empty_like(value) for name, value in single.items()}
        loss = np.float32(super().loss_and_gradients(single, batch, buffers))
        for name, value in buffers.items():
            out[name][...] = value
        return float(loss)


def nothing(parameters: Any, out: dict[str, Any]) -> None:
    pass


def mistakes(model: Any, batch: Any = (FEATURES, LABELS)) -> list[str]:
    return list(mistakes_of_a_step(model, model.parameters(0), batch))


@pytest.mark.parametrize(
    ("model", "batch"),
    [
        (Changed(nothing), (FEATURES, LABELS)),
        (SinglePrecision(nothing), (FEATURES, LABELS)),
        (MLP(features=6, hidden=(8, 5), classes=3), (FEATURES, LABELS)),
        (LinearRegression(), (FEATURES[:, :1], FEATURES[:, 1:2])),
    ],
)
def test_right_gradient_has_no_mistakes(model: Any, batch: Any) -> None:
    assert mistakes(model, batch) == []


def set_nan(parameters: Any, out: dict[str, Any]) -> None:
    out[SECOND][...] = np.nan


def set_one_infinite(parameters: Any, out: dict[str, Any]) -> None:
    out[SECOND][0, 0] = np.inf


def replace_by_another_shape(parameters: Any, out: dict[str, Any]) -> None:
    out[SECOND] = out[SECOND].T


def add_another(parameters: Any, out: dict[str, Any]) -> None:
    out["nobody"] = np.zeros(1)


def double(parameters: Any, out: dict[str, Any]) -> None:
    out[SECOND] *= 2


def forget_one_row(parameters: Any, out: dict[str, Any]) -> None:
    out[SECOND][3] = 0


def train_by_itself(parameters: Any, out: dict[str, Any]) -> None:
    parameters[SECOND][...] -= 0.1 * out[SECOND]


@pytest.mark.parametrize(
    ("change", "texts"),
    [
        (set_nan, ["not written"]),
        (set_one_infinite, ["1 of 24 elements"]),
        (replace_by_another_shape, ["shape (3, 8)", "(8, 3)"]),
        (double, ["wrong", "slope"]),
        (forget_one_row, ["wrong"]),
        (train_by_itself, ["writes to parameter"]),
    ],
)
def test_wrong_gradient_is_reported_with_its_variable(change: Any, texts: list[str]) -> None:
    (text,) = mistakes(Changed(change))
    for each in [repr(SECOND), *texts]:
        assert each in text


def test_gradient_of_no_parameter_is_reported() -> None:
    (text,) = mistakes(Changed(add_another))
    assert "'nobody'" in text


def test_large_error_is_reported_in_single_precision() -> None:
    (text,) = mistakes(SinglePrecision(double))
    assert repr(SECOND) in text


def test_loss_that_is_not_finite_is_reported() -> None:
    (text,) = mistakes(Changed(nothing), (np.full_like(FEATURES, np.nan), LABELS))
    assert "the loss" in text


def test_gradients_that_are_not_written_are_reported_together() -> None:
    def forget(parameters: Any, out: dict[str, Any]) -> None:
        for gradient in out.values():
            gradient[...] = np.nan

    (text,) = mistakes(Changed(forget))
    assert all(repr(name) in text for name in Changed(nothing).parameters(0))


def test_gradient_that_is_zero_everywhere_is_reported() -> None:
    def set_zero(parameters: Any, out: dict[str, Any]) -> None:
        for gradient in out.values():
            gradient[...] = 0

    (text,) = mistakes(Changed(set_zero))
    assert "every gradient is 0" in text


def test_loss_that_differs_from_call_to_call_has_no_slope() -> None:
    class Noisy(Changed):
        def loss_and_gradients(self, parameters: Any, batch: Any, out: Any) -> float:
            return super().loss_and_gradients(parameters, batch, out) + float(RANDOM.random())

    assert mistakes(Noisy(double)) == []


class ManyKinks:
    """A loss in float32 of a channel whose inputs lie at kinks, as black pixels behind ReLU do."""

    def __init__(self, factor: float) -> None:
        self._factor = factor  # of the gradient: 1 is correct

    def parameters(self, seed: int) -> dict[str, Any]:
        return {"bias": np.array([0.0], np.float32)}

    def loss_and_gradients(self, parameters: Any, batch: Any, out: Any) -> float:
        shifted = KINKS + np.float32(parameters["bias"])
        out["bias"][:] = self._factor * np.float32(np.mean(shifted > 0))
        return float(np.mean(np.maximum(shifted, 0), dtype=np.float32))

    def metrics(self, parameters: Any, batch: Any) -> dict[str, float]:
        return {}


KINKS = np.repeat(np.float32([-0.5, -0.0041, 0.0023, 0.5]), [100, 300, 500, 200])


@pytest.mark.parametrize(("factor", "number"), [(1.0, 0), (1.2, 1)])
def test_kinks_are_told_from_a_wrong_gradient(factor: float, number: int) -> None:
    assert len(mistakes(ManyKinks(factor))) == number
