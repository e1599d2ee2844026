"""Weights of examples by their class."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from zmqtrain.errors import DataError
from zmqtrain.models.base import Array, Batch
from zmqtrain.units import counted


def with_class_weights(batch: Batch, weights: Mapping[int, float], labels_at: int = 1) -> Batch:
    """Return (features, labels, weights), each example with the weight of its class.

    ``batch``: (features, labels), the labels being class numbers (n,) or (n, 1), or scores of shape
    (n, classes), of which the largest counts; or with weights already, which are multiplied. A
    class without a weight has 1. ``labels_at``: number of arrays of features.

    Raises:
        DataError: the batch holds something else.
    """
    examples, more = batch[: labels_at + 1], batch[labels_at + 1 :]
    has_weights = len(more) == 1 and is_weights(more[0], len(batch[0]))
    has_labels = len(examples) == labels_at + 1 and np.ndim(examples[-1]) in (1, 2)
    if not has_labels or (more and not has_weights):
        raise DataError(
            f"class_weight was given, and a batch has arrays of shapes {[b.shape for b in batch]}; "
            f"expected {counted(labels_at, 'array')} of features, labels with one class for each "
            "example, and at most one more, weights of floats"
        )
    labels = np.asarray(examples[-1])
    is_scores = labels.ndim == 2 and labels.shape[1] > 1
    are_classes = labels.dtype.kind in "biuf" and (is_scores or bool((labels % 1 == 0).all()))
    if not are_classes or (is_scores and labels.dtype.kind in "iu" and labels.max(initial=0) > 1):
        raise DataError(
            f"class_weight was given, and the labels of a batch are {labels.dtype} "
            f"{labels.reshape(-1)[:4].tolist()}; expected class numbers, or scores of the classes: "
            "number them, or give weights of examples instead"
        )
    classes = labels.argmax(axis=1) if is_scores else labels.reshape(-1)
    found = np.ones(len(classes), np.float32)
    for number, weight in weights.items():
        found[classes == number] = weight
    return *examples, found * more[0] if has_weights else found


def is_weights(array: Array, examples: int) -> bool:
    """Return whether an array can be weights of examples: floats of shape (n,)."""
    return np.shape(array) == (examples,) and np.asarray(array).dtype.kind == "f"
