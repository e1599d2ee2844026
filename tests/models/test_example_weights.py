"""Weights of examples: the loss is sum(weight * loss of the example) / n, whichever model it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from zmqtrain.data.weights import with_class_weights
from zmqtrain.errors import ConfigError, DataError
from zmqtrain.metrics import Accuracy
from zmqtrain.metrics.sums import Totals
from zmqtrain.models import MLP, LinearRegression
from zmqtrain.models.checks import labels_at

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(5, 3)).astype(np.float32)
LABELS = np.array([0, 1, 1, 2, 0])
WEIGHTS = np.array([2, 0, 1, 3, 0.5], np.float32)


def torch_model(as_module: bool) -> Any:
    torch = pytest.importorskip("torch")
    from zmqtrain.adapters.torch import TorchModel

    functions, nn = torch.nn.functional, torch.nn
    loss = nn.CrossEntropyLoss() if as_module else functions.cross_entropy
    return TorchModel(lambda: nn.Linear(3, 3), loss)


@pytest.mark.parametrize("kind", ["mlp", "softmax", "linear", "torch's function", "torch's module"])
def test_loss_and_gradients_are_weighted_means(kind: str) -> None:
    targets: Any = X[:, :2] if kind == "linear" else LABELS
    makers: dict[str, Any] = {
        "mlp": lambda: MLP(3, 4, 3),
        "softmax": lambda: MLP(3, (), 3),
        "linear": lambda: LinearRegression(3, 2),
    }
    model = makers[kind]() if kind in makers else torch_model("module" in kind)
    parameters = {k: v + np.float32(0.1) for k, v in model.parameters(1).items()}

    def step(*batch: Any) -> tuple[float, dict[str, Any]]:
        out = {name: np.empty_like(value) for name, value in parameters.items()}
        return model.loss_and_gradients(parameters, batch, out), out

    singles = [step(X[i : i + 1], targets[i : i + 1]) for i in range(5)]
    loss, gradients = step(X, targets, WEIGHTS)
    mean = sum(w * one for w, (one, _) in zip(WEIGHTS, singles, strict=True)) / 5
    assert loss == pytest.approx(mean, rel=1e-5)
    for name, gradient in gradients.items():
        expected = sum(w * out[name] for w, (_, out) in zip(WEIGHTS, singles, strict=True)) / 5
        np.testing.assert_allclose(gradient, expected, atol=1e-6)
    measures = model.metrics(parameters, (X, targets, WEIGHTS))
    assert measures["loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("labels", [LABELS, LABELS[:, None], np.eye(3, dtype=np.float32)[LABELS]])
def test_examples_have_the_weights_of_their_classes(labels: Any) -> None:
    *batch, weights = with_class_weights((X, labels), {0: 2.0, 2: 0.5})
    assert weights.tolist() == [2, 1, 1, 0.5, 2] and weights.dtype == np.float32
    assert batch[0] is X and batch[1] is labels
    assert with_class_weights((X, labels, WEIGHTS), {0: 2.0})[2].tolist() == [4, 0, 1, 3, 1]
    *batch, weights = with_class_weights((X, X, labels, WEIGHTS), {0: 2.0}, labels_at=2)
    assert weights.tolist() == [4, 0, 1, 3, 1] and batch[2] is labels


def test_weights_that_fit_nothing_are_refused() -> None:
    with pytest.raises(DataError, match="class_weight"):
        with_class_weights((X,), {0: 2.0})
    with pytest.raises(DataError, match="expected 2 arrays of features"):
        with_class_weights((X, LABELS), {0: 2.0}, labels_at=2)
    with pytest.raises(ConfigError, match="weights"):
        MLP(3, (), 3).loss_and_gradients({}, (X, LABELS, WEIGHTS[:2]), {})


@pytest.mark.parametrize(
    "labels", [[0.2, 0.9], ["0", "1"], [[3, 7], [0, 2]]], ids=["shares", "texts", "tokens"]
)
def test_labels_that_are_no_classes_are_refused_beside_class_weights(labels: Any) -> None:
    with pytest.raises(DataError, match="expected class numbers, or scores of the classes"):
        with_class_weights((X[:2], np.array(labels)), {0: 2.0})


def test_third_array_that_is_no_weight_is_refused_beside_class_weights() -> None:
    with pytest.raises(DataError, match="at most one more, weights of floats"):
        with_class_weights((X, LABELS, LABELS), {0: 2.0})


def test_metrics_measure_the_labels_of_a_batch_with_weights() -> None:
    scores = np.eye(3, dtype=np.float32)[LABELS]
    for batch in ((X, LABELS, WEIGHTS), (X, scores, WEIGHTS)):
        totals = Totals([Accuracy()])
        totals.add(scores, batch, MLP(3, 4, 3))
        assert totals.results() == {"accuracy": 1.0}


def test_weights_that_the_job_adds_are_behind_the_labels() -> None:
    assert labels_at(object(), (X, LABELS, WEIGHTS), "a test", is_weighted=True) == 1
    assert labels_at(object(), (X, LABELS), "a test") == 1
    with pytest.raises(ConfigError, match="labels_at"):
        labels_at(object(), (X, LABELS, WEIGHTS), "a test")
