"""A network of MNIST's size that also counts, exactly, how often each example was learned from.

It counts in a parameter, and in the rows of a table.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zmqtrain import Job
from zmqtrain.data import Arrays, Digits
from zmqtrain.models import MLP
from zmqtrain.models.base import Batch, Gradients, Parameters
from zmqtrain.models.tables import Ids, Table, Uniform
from zmqtrain.optim import SGD

BATCH_SIZE = 50
RATE = 0.125  # and its inverse are exact in binary, so counts stay whole numbers

_ODD = np.uint64(0x9E3779B97F4A7C15)


def ids_of(numbers: NDArray[np.int64]) -> Ids:
    """Return the rows in which examples are counted: ids of both signs, far from one another."""
    return (numbers.astype(np.uint64) * _ODD).view(np.int64)


class CountingMLP:
    """An MLP with one more parameter, and a table, which count examples."""

    def __init__(self, examples: int) -> None:
        self.examples = examples
        self.inner = MLP(features=784, hidden=100, classes=10)

    def __repr__(self) -> str:
        return f"CountingMLP({self.examples})"

    def parameters(self, seed: int) -> dict[str, Any]:
        counts = np.zeros((self.examples, 1), np.float32)
        return {"counts": counts, **self.inner.parameters(seed)}

    def tables(self, seed: int) -> dict[str, Table]:
        return {"seen": Table(dim=1, initial=Uniform(0.0))}

    def loss_and_gradients(self, parameters: Parameters, batch: Batch, out: Gradients) -> float:
        features, labels, numbers = batch
        own = {name: array for name, array in out.items() if name not in ("counts", "seen")}
        loss = self.inner.loss_and_gradients(parameters, (features, labels), own)
        out["counts"][:, 0] = -np.bincount(numbers, minlength=self.examples) / RATE
        ids = ids_of(numbers)
        parameters["seen"].take(ids)
        out["seen"].add(ids, np.full((len(ids), 1), -1 / RATE, np.float32))
        return loss

    def metrics(self, parameters: Parameters, batch: Batch) -> dict[str, float]:
        return self.inner.metrics(parameters, batch[:2])


def _as_large_as_mnist(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return digits of 28 x 28 pixels, labels, and each example's number."""
    features, labels = arrays
    images = np.kron(features.reshape(-1, 8, 8), np.ones((3, 3), np.float32))
    padded = np.pad(images, ((0, 0), (2, 2), (2, 2))).reshape(len(images), 784)
    return padded, labels, np.arange(len(labels))


_train, _test = (
    _as_large_as_mnist(part.take(np.arange(len(part)))) for part in Digits().load(None)
)

job = Job(
    model=CountingMLP(len(_train[0])),
    data=Arrays(_train, _test),
    optimizer=SGD(RATE),
    batch_size=BATCH_SIZE,
    policy="hogwild:whole",
    steps=int(os.environ.get("HEADLINE_STEPS", "9000")),
    partition_nbytes=2048,  # both ps hold a part of the counts
    max_nonfinite=0,
)
