"""Scores and labels of a batch as metrics count them: a row for each label, without masked ones."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from zmqtrain.errors import ConfigError
from zmqtrain.models.base import Array, Batch


def scores_and_classes(
    metric: Any, outputs: Array, batch: Batch
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the scores (m, classes), one column if they are binary, and the class numbers (m,).

    Each label counts as an example: sequences (n, length, classes) have n * length of them. Those
    that are masked or ignored are left out.
    """
    scores, labels, counts = _given(metric, outputs, batch)
    if scores.ndim == 1:
        scores, counts = scores[:, None], counts[:, None]
    axis = _class_axis(metric, scores.shape, labels.shape)
    scores = np.moveaxis(scores, axis, -1)
    counts = np.asarray(np.moveaxis(counts, axis, -1).all(axis=-1))
    width = scores.shape[-1]
    if labels.shape == scores.shape and width > 1:
        labels = _one_hot_classes(metric, labels)
    elif labels.shape != counts.shape and labels.size == counts.size:
        labels = labels.reshape(counts.shape)
    if labels.shape != counts.shape:
        raise wrong_shapes(metric, outputs, batch, "outputs (n, classes) and labels (n,)")
    if metric.ignore_index is not None:
        counts = counts & (labels != metric.ignore_index)
    return scores[counts], class_numbers(metric, labels[counts], max(2, width))


def _class_axis(metric: Any, outputs: tuple[int, ...], labels: tuple[int, ...]) -> int:
    """Return the axis of the classes: the second if it alone fits the labels, else the last."""
    axis = metric.axis
    if axis is None:
        return 1 if fitting_axes(outputs, labels) == [1] else -1
    if not -len(outputs) <= axis < len(outputs):
        raise ConfigError(
            f"{metric!r} got outputs of shape {outputs}; expected them to have the axis {axis}; "
            "correct axis"
        )
    return int(axis)


def fitting_axes(outputs: tuple[int, ...], labels: tuple[int, ...]) -> list[int]:
    """Return the possible axes of the classes in outputs of more than two axes: 1, -1 or both."""
    without = {1: outputs[:1] + outputs[2:], -1: outputs[:-1]} if len(outputs) > 2 else {}
    return [axis for axis, left in without.items() if _without_ones(left) == _without_ones(labels)]


def _one_hot_classes(metric: object, labels: NDArray[Any]) -> NDArray[np.int64]:
    """Return the class numbers of rows that are one-hot, or probabilities of the classes."""
    sums = np.asarray(labels, np.float64).sum(axis=-1)
    if not (np.abs(sums - 1) < 1e-3).all() or (labels < 0).any():
        raise ConfigError(
            f"{metric!r} got rows of labels that add up to {sums.min():g} to {sums.max():g}; "
            "expected one class in each row; several labels of an example are several questions, "
            "as Precision, Recall and AUC take them"
        )
    return np.asarray(labels.argmax(axis=-1), np.int64)


def binary(
    metric: Any, outputs: Array, batch: Batch
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return scores (m,) and whether each label is 1; several columns are several questions."""
    expected = "a score for each label, 0 or 1; for one of several classes give class_id"
    scores, labels = pairs(metric, outputs, batch, expected)
    if (ignored := getattr(metric, "ignore_index", None)) is not None:
        scores, labels = scores[labels != ignored], labels[labels != ignored]
    return scores, class_numbers(metric, labels, 2) == 1


def pairs(
    metric: object, outputs: Array, batch: Batch, expected: str
) -> tuple[NDArray[np.float64], NDArray[Any]]:
    """Return outputs (m,) and their labels, without masked ones."""
    values, labels, counts = _given(metric, outputs, batch)
    if len(values) != len(labels) or _without_ones(values.shape) != _without_ones(labels.shape):
        raise wrong_shapes(metric, outputs, batch, expected)
    return values.astype(np.float64)[counts], labels.reshape(values.shape)[counts]


def _given(
    metric: object, outputs: Array, batch: Batch
) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.bool_]]:
    """Return outputs, labels, and which of the outputs are not masked."""
    if isinstance(outputs, tuple):
        raise ConfigError(
            f"{metric!r} got {len(outputs)} outputs; expected one: measure them in the model's own "
            "metrics, or write a metric that takes a tuple"
        )
    labels = np.asarray(batch[-1])
    if np.ndim(outputs) == 0 or labels.ndim == 0 or len(batch) < 2 or labels.dtype.kind in "OSU":
        raise wrong_shapes(metric, outputs, batch, "a row for each example, and numbers as labels")
    return np.asarray(outputs), labels, ~np.ma.getmaskarray(outputs)


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:1], *(size for size in shape[1:] if size != 1))


def predicted_classes(metric: Any, scores: NDArray[Any]) -> NDArray[np.int64]:
    """Return the predicted class of each row of scores; -1 if it holds NaN."""
    is_binary = scores.shape[1] == 1
    predicted = positive(metric, scores[:, 0]) if is_binary else scores.argmax(axis=1)
    return np.where(np.isnan(scores).any(axis=1), -1, predicted)


def positive(metric: Any, scores: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which scores of one column are positive."""
    if metric.threshold is None:
        check_probabilities(metric, scores, f"{type(metric).__name__}(threshold=0)")
    threshold = 0.5 if metric.threshold is None else metric.threshold
    return np.asarray(scores > threshold)


def check_probabilities(metric: object, scores: NDArray[Any], of_logits: str) -> None:
    if ((scores < 0) | (scores > 1)).any():
        raise ConfigError(
            f"{metric!r} got outputs from {scores.min():g} to {scores.max():g}; expected "
            f"probabilities from 0 to 1; for logits use {of_logits}"
        )


def class_numbers(metric: object, classes: NDArray[Any], count: int) -> NDArray[np.int64]:
    """Return labels as int64."""
    fits = (classes >= 0) & (classes < count) & (classes == np.floor(classes))
    if not fits.all():
        raise ConfigError(
            f"{metric!r} got class {float(classes[~fits][0]):g}; expected 0 to {count - 1}, as "
            f"outputs have {count} classes; correct the labels, or the model's outputs; labels "
            "that do not count are left out by ignore_index="
        )
    return classes.astype(np.int64)


def wrong_shapes(metric: object, outputs: Array, batch: Batch, expected: str) -> ConfigError:
    labels = "no labels"
    if len(batch) > 1:
        labels = f"{np.asarray(batch[-1]).dtype} labels of shape {np.shape(batch[-1])}"
    return ConfigError(
        f"{metric!r} got outputs of shape {np.shape(outputs)} and {labels}; expected {expected}; "
        "correct what the model's predict() returns, or choose another metric"
    )
