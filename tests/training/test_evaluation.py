"""Measuring and predicting with whole data sets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from zmqtrain.data import ArrayDataset
from zmqtrain.errors import ConfigError, DataError
from zmqtrain.metrics import Accuracy, ConfusionMatrix, MeanSquaredError
from zmqtrain.models import MLP, LinearRegression
from zmqtrain.training.evaluation import evaluate, predict

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(25, 3)).astype(np.float32)
LABELS = RANDOM.integers(0, 4, 25)


@pytest.mark.parametrize("model", [MLP(3, 5, 4), MLP(3, (), 4)], ids=repr)
@pytest.mark.parametrize("rows", [1, 7, 100])
def test_metrics_agree_with_the_models_own_measures(model: Any, rows: int) -> None:
    parameters = model.parameters(3)
    metrics = [Accuracy(name="by outputs"), ConfusionMatrix(4)]
    measures = evaluate(model, parameters, ArrayDataset(X, LABELS), metrics=metrics, rows=rows)
    assert measures["by outputs"] == pytest.approx(measures["accuracy"])
    assert np.trace(measures["confusion_matrix"]) / 25 == pytest.approx(measures["accuracy"])


@pytest.mark.parametrize("model", [MLP(3, 5, 4), MLP(3, (), 4)], ids=repr)
def test_classifier_predicts_probabilities_without_labels(model: Any) -> None:
    outputs = predict(model, model.parameters(3), ArrayDataset(X), rows=10)
    assert outputs.shape == (25, 4)
    assert outputs.sum(axis=1) == pytest.approx(np.ones(25), abs=1e-6)
    assert (outputs > 0).all()


def test_loss_of_a_line_is_the_mean_squared_error_of_its_predictions() -> None:
    model = LinearRegression(3, 2)
    parameters = {name: value + 0.5 for name, value in model.parameters(0).items()}
    dataset = ArrayDataset(X, RANDOM.normal(size=(25, 2)))
    measures = evaluate(model, parameters, dataset, metrics=[MeanSquaredError()], rows=6)
    assert measures["mean_squared_error"] == pytest.approx(measures["loss"])


class Negating:
    """Writes to its inputs, as a module of torch whose first layer is in place."""

    def metrics(self, parameters: Any, batch: Any) -> dict[str, float]:
        batch[0][...] *= -1
        return {"loss": 1.0}

    def predict(self, parameters: Any, batch: Any) -> Any:
        return batch[0]


def test_metrics_are_of_the_inputs_that_the_data_gave() -> None:
    measures = evaluate(Negating(), {}, ArrayDataset(X, X), metrics=[MeanSquaredError()])
    assert measures["mean_squared_error"] == 0.0


class Silent:
    """A model without predict()."""

    def metrics(self, parameters: Any, batch: Any) -> dict[str, float]:
        return {"loss": 1.0}


class Short(Silent):
    def predict(self, parameters: Any, batch: Any) -> Any:
        return np.zeros((len(batch[0]) - 1, 4))


@pytest.mark.parametrize("model", [Silent(), Short()])
def test_metric_needs_a_model_that_predicts_a_row_for_each_example(model: Any) -> None:
    dataset = ArrayDataset(X, LABELS)
    assert evaluate(model, {}, dataset) == {"loss": 1.0}
    with pytest.raises(ConfigError, match="predict"):
        evaluate(model, {}, dataset, metrics=[Accuracy()])


def test_nothing_cannot_be_predicted() -> None:
    with pytest.raises(DataError):
        predict(MLP(3, 5, 4), {}, ArrayDataset(X[:0]))
