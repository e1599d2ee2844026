from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from zmqtrain.models import MLP, LinearRegression


def test_line_through_the_targets_has_no_loss() -> None:
    parameters = {"weights": np.array([[2.0]], np.float32), "bias": np.array([1.0], np.float32)}
    x = np.array([[0.0], [1.0], [3.0]], np.float32)
    assert LinearRegression().metrics(parameters, (x, 2 * x + 1)) == {"loss": 0.0}


def test_loss_of_a_line_is_the_mean_of_the_squared_distances() -> None:
    parameters = LinearRegression(outputs=2).parameters(0)
    targets = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
    metrics = LinearRegression(outputs=2).metrics(parameters, (np.zeros((2, 1)), targets))
    assert metrics == {"loss": (1 + 4 + 9 + 16) / 4}


def test_classifier_of_known_logits_has_known_metrics() -> None:
    logits = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8], [0.2, 0.6, 0.2]]))
    parameters = {"layer0/weights": np.eye(3), "layer0/bias": np.zeros(3)}
    metrics = MLP(3, (), 3).metrics(parameters, (logits, np.array([0, 2, 0])))
    assert metrics == {
        "loss": pytest.approx(-np.log([0.5, 0.8, 0.2]).mean()),
        "accuracy": pytest.approx(2 / 3),
    }
    assert {type(value) for value in metrics.values()} == {float}


@pytest.mark.parametrize("model", [MLP(4, (), 10), MLP(4, 5, 10)], ids=repr)
def test_classifier_that_knows_nothing_has_the_loss_of_a_guess(model: Any) -> None:
    parameters = {name: np.zeros_like(value) for name, value in model.parameters(0).items()}
    batch = np.ones((20, 4), np.float32), np.arange(20) % 10
    metrics = model.metrics(parameters, batch)
    assert metrics["loss"] == pytest.approx(np.log(10), rel=1e-6)
    assert metrics["accuracy"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    "model", [LinearRegression(4, 2), MLP(4, (), 3), MLP(4, (5, 6), 3)], ids=repr
)
def test_metrics_and_step_report_the_same_loss(model: Any) -> None:
    random = np.random.default_rng(0)
    parameters = model.parameters(0)
    features = random.normal(0, 1, (9, 4)).astype(np.float32)
    labels = random.integers(0, 3, 9)
    answers = features[:, :2] if isinstance(model, LinearRegression) else labels
    out = {name: np.empty_like(value) for name, value in parameters.items()}
    loss = model.loss_and_gradients(parameters, (features, answers), out)
    assert model.metrics(parameters, (features, answers))["loss"] == pytest.approx(loss, rel=1e-6)
