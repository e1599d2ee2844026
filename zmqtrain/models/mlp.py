"""The multi-layer perceptron."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from zmqtrain.models.backend import Scratch, array_module, quiet
from zmqtrain.models.base import (
    Array,
    BaseModel,
    Batch,
    Gradients,
    Parameters,
    is_measured,
    measured,
    written,
)
from zmqtrain.models.checks import check_sizes, features_of, labelled


@dataclass(frozen=True)
class MLP(BaseModel):
    """A classifier of fully connected layers: ReLU after each hidden one, softmax at the end.

    ``hidden`` is the width of the hidden layer, or a list of widths; () is softmax regression.
    Parameters, for layer 0, 1, ...: ``layer0/weights`` (fan in, fan out), normal with deviation
    sqrt(2 / fan in) (He et al. 2015, "Delving deep into rectifiers"), and ``layer0/bias``
    (fan out,), zero. The loss is the mean cross entropy. A batch is (features (n, features),
    labels (n,)), labels being class numbers.

    One instance may be used by several threads at once.
    """

    features: int
    hidden: int | Sequence[int]
    classes: int
    labels_at = 1

    def __post_init__(self) -> None:
        check_sizes("MLP", features=self.features, classes=self.classes)
        for width in _as_tuple(self.hidden):
            check_sizes("MLP", hidden=width)
        object.__setattr__(self, "hidden", _as_tuple(self.hidden))

    def parameters(self, seed: int) -> dict[str, Array]:
        random = np.random.Generator(np.random.PCG64(seed))
        values: dict[str, Array] = {}
        fan_in = self.features
        for (weights, bias), fan_out in zip(self._names, self._widths, strict=True):
            deviation = np.float32(np.sqrt(2 / fan_in))
            values[weights] = random.standard_normal((fan_in, fan_out), np.float32) * deviation
            values[bias] = np.zeros(fan_out, np.float32)
            fan_in = fan_out
        return values

    def loss_and_gradients(self, parameters: Parameters, batch: Batch, out: Gradients) -> float:
        inputs, labels = labelled(batch, self.features, self.classes)
        like = parameters[self._names[0][0]]
        layers, hidden_widths = len(self._widths), self._widths[:-1]
        buffers = self._scratch.arrays(like, len(inputs), self._widths + hidden_widths)
        outputs, deltas = buffers[:layers], buffers[layers:]
        with quiet():
            self._forward(parameters, inputs, outputs)
            self._measure(out, outputs[-1], batch)
            loss = _softmax_cross_entropy(outputs[-1], labels, *batch[2:])
            self._backward(parameters, [inputs, *outputs[:-1]], [*deltas, outputs[-1]], out)
            return float(loss)

    def metrics(self, parameters: Parameters, batch: Batch) -> dict[str, float]:
        inputs, labels = labelled(batch, self.features, self.classes)
        with quiet():
            logits = self._logits(parameters, inputs)
            accuracy = float((logits.argmax(axis=1) == labels).mean())
            loss = _softmax_cross_entropy(logits, labels, *batch[2:])  # overwrites them
            return {"loss": float(loss), "accuracy": accuracy}

    def predict(self, parameters: Parameters, batch: Batch) -> Array:
        """Return the probabilities (n, classes); ``batch`` needs no labels."""
        with quiet():
            return _softmax(self._logits(parameters, features_of(batch, self.features)))

    @staticmethod
    def _measure(out: Gradients, logits: Array, batch: Batch) -> None:
        """Report the measures of a step if they are used; the logits stay as they are."""
        if is_measured(out):
            accuracy = float((logits.argmax(axis=1) == batch[1]).mean())
            means = {"accuracy": accuracy}
            measured(out, len(logits), means, lambda: (_softmax(logits.copy()), batch))

    def _logits(self, parameters: Parameters, inputs: Array) -> Array:
        # Not the model's own scratch: evaluation sets are large, and would be kept.
        outputs = Scratch().arrays(parameters[self._names[0][0]], len(inputs), self._widths)
        self._forward(parameters, inputs, outputs)
        return outputs[-1]

    def _forward(self, parameters: Parameters, inputs: Array, outputs: list[Array]) -> None:
        """Write each layer's output (n, fan out) into ``outputs``; the last are the logits."""
        xp = array_module(inputs)
        for (weights, bias), output in zip(self._names, outputs, strict=True):
            xp.matmul(inputs, parameters[weights], out=output)
            output += parameters[bias]
            if output is not outputs[-1]:
                xp.maximum(output, 0, out=output)
            inputs = output

    def _backward(
        self, parameters: Parameters, inputs: list[Array], deltas: list[Array], out: Gradients
    ) -> None:
        """Write the gradients, last layer first.

        ``inputs`` and ``deltas`` hold, for each layer, its input and the gradient of what came
        out. Only the last delta is given; the others are computed here.
        """
        xp = array_module(inputs[0])
        for layer in reversed(range(len(deltas))):
            weights, bias = self._names[layer]
            xp.matmul(inputs[layer].T, deltas[layer], out=out[weights])
            xp.sum(deltas[layer], axis=0, out=out[bias])
            written(out, weights, bias)
            if layer > 0:
                xp.matmul(deltas[layer], parameters[weights].T, out=deltas[layer - 1])
                deltas[layer - 1] *= inputs[layer] > 0

    @cached_property
    def _widths(self) -> tuple[int, ...]:
        """Outputs of each layer."""
        return (*_as_tuple(self.hidden), self.classes)

    @cached_property
    def _names(self) -> tuple[tuple[str, str], ...]:
        """Names of each layer's weights and bias."""
        return tuple((f"layer{i}/weights", f"layer{i}/bias") for i in range(len(self._widths)))

    @cached_property
    def _scratch(self) -> Scratch:
        return Scratch()


def _as_tuple(hidden: int | Sequence[int]) -> tuple[int, ...]:
    return tuple(hidden) if isinstance(hidden, Sequence) else (hidden,)


def _softmax_cross_entropy(logits: Array, labels: Array, *weights: Array) -> Array:
    """Replace ``logits`` (n, classes) by the gradient of their mean cross entropy with ``labels``
    (n,), class numbers; return that mean as a 0-d array (on a GPU it need not be ready yet).

    With p = softmax(logits): loss = mean of -log p[label], gradient = (p - onehot(label)) / n, each
    example times its weight (n,), if ``weights`` are given.
    The largest logit of a row is subtracted first, so that no exponential overflows.
    """
    xp = array_module(logits)
    rows = xp.arange(len(labels))
    logits -= logits.max(axis=1, keepdims=True)
    label_logits = logits[rows, labels]
    xp.exp(logits, out=logits)
    totals = logits.sum(axis=1, keepdims=True)
    losses = xp.log(totals[:, 0]) - label_logits
    logits /= totals
    logits[rows, labels] -= 1
    logits /= len(labels)
    for weight in weights:
        losses *= weight
        logits *= weight[:, None]
    return losses.mean()


def _softmax(logits: Array) -> Array:
    """Replace ``logits`` (n, classes) by their probabilities, and return them."""
    xp = array_module(logits)
    logits -= logits.max(axis=1, keepdims=True)
    xp.exp(logits, out=logits)
    logits /= logits.sum(axis=1, keepdims=True)
    return logits
