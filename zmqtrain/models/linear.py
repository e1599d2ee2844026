"""Linear regression."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zmqtrain.errors import ConfigError
from zmqtrain.models.backend import array_module, quiet
from zmqtrain.models.base import Array, BaseModel, Batch, Gradients, Parameters, measured
from zmqtrain.models.checks import check_sizes, examples_of, features_of


@dataclass(frozen=True, slots=True)
class LinearRegression(BaseModel):
    """outputs = features @ weights + bias, fitted to the mean squared error.

    Parameters, zero at first: ``weights`` (features, outputs), ``bias`` (outputs,). A batch is
    (features (n, features), targets (n, outputs), or (n,) for one output). The mean of the loss
    runs over examples and outputs.
    """

    features: int = 1
    outputs: int = 1
    labels_at = 1

    def __post_init__(self) -> None:
        check_sizes("LinearRegression", features=self.features, outputs=self.outputs)

    def parameters(self, seed: int) -> dict[str, Array]:
        shapes = {"weights": (self.features, self.outputs), "bias": (self.outputs,)}
        return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}

    def loss_and_gradients(self, parameters: Parameters, batch: Batch, out: Gradients) -> float:
        with quiet():
            inputs, residuals = self._residuals(parameters, batch)
            targets = batch[1].reshape(residuals.shape)
            measured(out, len(inputs), {}, lambda: (residuals + targets, batch))
            weighted = _weighted(residuals, batch)
            loss = (residuals * weighted).mean()
            weighted *= 2 / residuals.size
            xp = array_module(weighted)
            xp.matmul(inputs.T, weighted, out=out["weights"])
            xp.sum(weighted, axis=0, out=out["bias"])
            return float(loss)

    def metrics(self, parameters: Parameters, batch: Batch) -> dict[str, float]:
        with quiet():
            _, residuals = self._residuals(parameters, batch)
            return {"loss": float((residuals * _weighted(residuals, batch)).mean())}

    def predict(self, parameters: Parameters, batch: Batch) -> Array:
        """Return the outputs (n, outputs); ``batch`` needs no targets."""
        with quiet():
            return _affine(parameters, features_of(batch, self.features))

    def _residuals(self, parameters: Parameters, batch: Batch) -> tuple[Array, Array]:
        inputs, targets = examples_of(batch, self.features)
        rows = len(inputs)
        if targets.size != rows * self.outputs:
            raise ConfigError(
                f"the data gives targets of shape {targets.shape}; the model expects "
                f"{(rows, self.outputs)}; set the model's outputs to the width of the targets"
            )
        residuals = _affine(parameters, inputs)
        # As a column: (n, 1) - (n,) would broadcast to (n, n).
        residuals -= targets.reshape(residuals.shape)
        return inputs, residuals


def _weighted(residuals: Array, batch: Batch) -> Array:
    """Return the residuals times the weights of their examples, if the batch has them."""
    return residuals * batch[2][:, None] if len(batch) == 3 else residuals


def _affine(parameters: Parameters, inputs: Array) -> Array:
    result = inputs @ parameters["weights"]
    result += parameters["bias"]
    return result
