"""Weights of examples by their class."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from zmqtrain.errors import DataError
from zmqtrain.models.base import Array, Batch


def with_class_weights(batch: Batch, weights: Mapping[int, float]) -> Batch:
    """Return (features, labels, weights), each example weighing what its class does.

    ``batch``: (features, labels), the labels being class numbers (n,) or (n, 1), or scores of shape
    (n, classes), of which the largest counts; or with weights already, which are multiplied. A
    class that is not among ``weights`` weighs 1.

    Raises:
        DataError: the batch holds something else.
    """
    has_weights = len(batch) == 3 and is_weights(batch[2], len(batch[0]))
    if not (len(batch) == 2 or has_weights) or np.ndim(batch[1]) not in (1, 2):
        raise DataError(
            f"class_weight was given, and a batch has arrays of shapes {[b.shape for b in batch]}; "
            "expected (features, labels) with one class for each example, and weights of floats if "
            "there is a third"
        )
    labels = np.asarray(batch[1])
    is_scores = labels.ndim == 2 and labels.shape[1] > 1
    classes = labels.argmax(axis=1) if is_scores else labels.reshape(-1)
    found = np.ones(len(classes), np.float32)
    for number, weight in weights.items():
        found[classes == number] = weight
    return *batch[:2], found * batch[2] if has_weights else found


def is_weights(array: Array, examples: int) -> bool:
    """Return whether an array can be weights of examples: floats of shape (n,)."""
    return np.shape(array) == (examples,) and np.asarray(array).dtype.kind == "f"
