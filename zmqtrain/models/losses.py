"""Softmax cross entropy, shared by the classifiers."""

from __future__ import annotations

from zmqtrain.models.backend import array_module
from zmqtrain.models.base import Array


def softmax_cross_entropy(logits: Array, labels: Array, *weights: Array) -> Array:
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


def classifier_metrics(logits: Array, labels: Array, *weights: Array) -> dict[str, float]:
    """Return the mean ``loss`` and the ``accuracy`` (0..1); ``logits`` are overwritten.

    ``weights``: of the examples, for the loss alone.
    """
    accuracy = float((logits.argmax(axis=1) == labels).mean())
    return {"loss": float(softmax_cross_entropy(logits, labels, *weights)), "accuracy": accuracy}


def softmax(logits: Array) -> Array:
    """Replace ``logits`` (n, classes) by their probabilities, and return them."""
    xp = array_module(logits)
    logits -= logits.max(axis=1, keepdims=True)
    xp.exp(logits, out=logits)
    logits /= logits.sum(axis=1, keepdims=True)
    return logits
