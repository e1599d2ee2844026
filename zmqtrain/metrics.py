"""Measures of a model's outputs, each a sum over examples.

A metric turns a batch into an array of sums. Sums of parts of a data set are added, so a result
does not depend on how the set was cut. The outputs come from the model's ``predict``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from zmqtrain.errors import ConfigError
from zmqtrain.models.base import Array, Batch
from zmqtrain.models.checks import check_sizes
from zmqtrain.user_code import user_code

Sums: TypeAlias = NDArray[np.float64]
Measures: TypeAlias = dict[str, Any]
"""Names and results: floats, or float64 arrays of a metric such as a confusion matrix."""


@runtime_checkable
class Metric(Protocol):
    """A measure of a model's outputs."""

    @property
    def name(self) -> str:
        """The name under which the result is shown."""
        ...

    def update(self, outputs: Array, batch: Batch) -> Sums:
        """Return the sums over one batch, always of the same shape.

        ``outputs``: what the model's ``predict`` returned for ``batch``, one row an example. The
        last array of ``batch`` holds the labels.

        Raises:
            ConfigError: outputs or labels have a shape that this metric has no use for.
        """
        ...

    def result(self, sums: Sums) -> float | Sums:
        """Return the measure over all examples whose sums were added; NaN if it has no value."""
        ...


class _Mean:
    """Sums a value over examples, and counts them."""

    def result(self, sums: Sums) -> float:
        return _ratio(*sums)


@dataclass(frozen=True)
class Accuracy(_Mean):
    """Share of the examples whose class is right.

    Outputs with several columns, a score for each class, are right where the largest is that of the
    label: a class number, or a row that is one-hot. Outputs with one column are right where
    ``output > threshold`` equals the label, 0 or 1.
    """

    threshold: float = 0.5
    name: str = "accuracy"

    def update(self, outputs: Array, batch: Batch) -> Sums:
        scores, classes = _scores_and_classes(self, outputs, batch)
        if scores.shape[1] == 1:
            right = (scores[:, 0] > self.threshold) == (classes == 1)
        else:
            right = scores.argmax(axis=1) == classes
        return np.array([np.count_nonzero(right), len(right)], np.float64)


@dataclass(frozen=True)
class TopK(_Mean):
    """Share of the examples whose class is among the ``k`` with the largest scores.

    Of equal scores the classes with lower numbers come first.
    """

    k: int = 5
    name: str = ""

    def __post_init__(self) -> None:
        check_sizes("TopK", k=self.k)
        object.__setattr__(self, "name", self.name or f"top_{self.k}_accuracy")

    def update(self, outputs: Array, batch: Batch) -> Sums:
        scores, classes = _scores_and_classes(self, outputs, batch)
        own = scores[np.arange(len(classes)), classes][:, None]
        lower = np.arange(scores.shape[1]) < classes[:, None]
        before = ((scores > own) | ((scores == own) & lower)).sum(axis=1)
        return np.array(
            [np.count_nonzero((before < self.k) & np.isfinite(own[:, 0])), len(classes)], np.float64
        )


@dataclass(frozen=True)
class _Detection:
    """Counts of true positives, false positives and false negatives.

    Outputs are scores of "yes" for labels 0 and 1: ``output > threshold`` says yes. With
    ``class_id`` outputs have a column for each class, labels are class numbers or one-hot, and the
    largest score says which class it is.
    """

    threshold: float = 0.5
    class_id: int | None = None

    def update(self, outputs: Array, batch: Batch) -> Sums:
        if self.class_id is None:
            scores, truth = _binary(self, outputs, batch)
            said = scores > self.threshold
        else:
            every, classes = _scores_and_classes(self, outputs, batch)
            _check_classes(self, np.array([self.class_id]), every.shape[1])
            said, truth = every.argmax(axis=1) == self.class_id, classes == self.class_id
        counts = [said & truth, said & ~truth, ~said & truth]
        return np.array([np.count_nonzero(count) for count in counts], np.float64)


@dataclass(frozen=True)
class Precision(_Detection):
    """Share of the examples said to be positive that are: TP / (TP + FP).

    ``output > threshold`` says that an example is positive; labels are 0 and 1. With ``class_id``
    an example is positive if it is of that class.
    """

    name: str = "precision"

    def result(self, sums: Sums) -> float:
        return _ratio(sums[0], sums[0] + sums[1])


@dataclass(frozen=True)
class Recall(_Detection):
    """Share of the positive examples that are found: TP / (TP + FN); see :class:`Precision`."""

    name: str = "recall"

    def result(self, sums: Sums) -> float:
        return _ratio(sums[0], sums[0] + sums[2])


@dataclass(frozen=True)
class AUC:
    """Area under the ROC curve of scores for labels 0 and 1.

    The curve is taken at ``thresholds`` places, evenly from 0 to 1 with one below and one above,
    and is straight between them, as Keras has it. Scores are probabilities; with ``from_logits``
    their logits.
    """

    thresholds: int = 200
    from_logits: bool = False
    name: str = "auc"

    def __post_init__(self) -> None:
        check_sizes("AUC", thresholds=self.thresholds)
        if self.thresholds < 2:
            raise ConfigError(f"AUC: thresholds is {self.thresholds}; expected at least 2")

    def update(self, outputs: Array, batch: Batch) -> Sums:
        scores, truth = _binary(self, outputs, batch)
        if self.from_logits:
            scores = 0.5 * (1 + np.tanh(scores / 2))  # the logistic function, without overflow
        elif len(scores) and not (scores.min() >= 0 and scores.max() <= 1):
            raise ConfigError(
                f"{self!r} got outputs from {scores.min():g} to {scores.max():g}; expected "
                "probabilities from 0 to 1; for logits use AUC(from_logits=True)"
            )
        inner = np.arange(1, self.thresholds - 1) / (self.thresholds - 1)
        places = np.concatenate([[-np.inf], inner, [np.inf]])
        said = np.searchsorted(places, scores, side="left")  # so many thresholds are below
        histograms = [
            np.bincount(said[which], minlength=self.thresholds + 1) for which in (truth, ~truth)
        ]
        return np.array(histograms, np.float64)

    def result(self, sums: Sums) -> float:
        above = sums[:, ::-1].cumsum(axis=1)[:, :-1]  # positives and negatives above a threshold
        found, false = (_ratios(row, row[-1]) for row in above)
        return float(np.sum((found[1:] + found[:-1]) * np.diff(false)) / 2)


@dataclass(frozen=True)
class ConfusionMatrix:
    """How many examples of each class (row) were taken for each class (column).

    Outputs have a column for each of ``classes``; with one column there are the classes 0 and 1.
    """

    classes: int
    threshold: float = 0.5
    name: str = "confusion_matrix"

    def __post_init__(self) -> None:
        check_sizes("ConfusionMatrix", classes=self.classes)

    def update(self, outputs: Array, batch: Batch) -> Sums:
        scores, truth = _scores_and_classes(self, outputs, batch)
        if max(2, scores.shape[1]) != self.classes:
            raise _wrong_shapes(self, outputs, batch, f"outputs for {self.classes} classes")
        is_binary = scores.shape[1] == 1
        said = scores[:, 0] > self.threshold if is_binary else scores.argmax(axis=1)
        cells = np.bincount(truth * self.classes + said, minlength=self.classes**2)
        return cells.reshape(self.classes, self.classes).astype(np.float64)

    def result(self, sums: Sums) -> Sums:
        return sums


@dataclass(frozen=True)
class MeanSquaredError(_Mean):
    """Mean of (output - target)^2 over examples and outputs."""

    name: str = "mean_squared_error"

    def update(self, outputs: Array, batch: Batch) -> Sums:
        errors = _errors(self, outputs, batch)
        return np.array([np.sum(errors * errors), errors.size], np.float64)


@dataclass(frozen=True)
class MeanAbsoluteError(_Mean):
    """Mean of abs(output - target) over examples and outputs."""

    name: str = "mean_absolute_error"

    def update(self, outputs: Array, batch: Batch) -> Sums:
        errors = _errors(self, outputs, batch)
        return np.array([np.sum(np.abs(errors)), errors.size], np.float64)


def checked(metrics: Sequence[Any]) -> tuple[Metric, ...]:
    """Return the metrics as a tuple.

    Raises:
        ConfigError: one is no metric, or two have the same name.
    """
    for metric in metrics:
        if isinstance(metric, type) or not isinstance(metric, Metric):
            example = f"{metric.__name__}()" if isinstance(metric, type) else "Accuracy()"
            raise ConfigError(
                f"{metric!r} is not a metric; expected objects with name, update and result, such "
                f"as {example}; see zmqtrain.metrics"
            )
    names = [metric.name for metric in metrics]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"two metrics are called {twice[0]!r}; give one of them another name=")
    return tuple(metrics)


class Totals:
    """The sums of several metrics over the batches so far."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics
        self.sums: dict[str, Sums] = {}  # by the names of the metrics

    def add(self, outputs: Array, batch: Batch) -> None:
        """Count one batch.

        Raises:
            ConfigError: a metric raises, or has no use for such outputs.
        """
        for metric in self._metrics:
            with user_code("update()", metric):
                sums = metric.update(outputs, batch)
            self._add(metric, sums)

    def merge(self, sums: Mapping[str, Sums]) -> None:
        """Count the examples of these sums, too.

        Raises:
            ConfigError: they have another shape.
        """
        for metric in self._metrics:
            self._add(metric, sums[metric.name])

    def _add(self, metric: Metric, sums: Sums) -> None:
        before = self.sums.setdefault(metric.name, np.zeros_like(sums))
        if np.shape(sums) != before.shape:
            raise ConfigError(
                f"update() of {metric!r} returned arrays of the shapes {before.shape} and "
                f"{np.shape(sums)}; expected the same for each batch: sums over its examples"
            )
        self.sums[metric.name] = before + sums

    def results(self) -> Measures:
        """Return each metric's result; there was at least one batch.

        Raises:
            ConfigError: a metric raises.
        """
        measures: Measures = {}
        for metric in self._metrics:
            with user_code("result()", metric):
                measures[metric.name] = metric.result(self.sums[metric.name])
        return measures


def added(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """Return the sums of what both have: what one part lacks is not measured of the whole."""
    return {name: value + other[name] for name, value in one.items() if name in other}


def numbers(measures: Mapping[str, Any]) -> dict[str, float]:
    """Return the measures that are numbers; arrays and what callbacks add besides are left out."""
    return {
        name: float(value)
        for name, value in measures.items()
        if not isinstance(value, str | None) and np.ndim(value) == 0
    }


def _scores_and_classes(
    metric: object, outputs: Array, batch: Batch
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the scores (m, classes), one column if they are binary, and the class numbers (m,).

    Sequences (n, length, classes) count as n * length examples.
    """
    scores, labels = np.asarray(outputs), _labels(metric, outputs, batch)
    if scores.ndim == 1:
        scores = scores[:, None]
    if labels.shape == scores.shape and scores.shape[-1] > 1:
        labels = labels.argmax(axis=-1)
    elif labels.shape == (*scores.shape[:-1], 1):
        labels = labels[..., 0]
    if labels.shape != scores.shape[:-1]:
        raise _wrong_shapes(metric, outputs, batch, "outputs (n, classes) and labels (n,)")
    width = scores.shape[-1]
    classes = labels.reshape(-1).astype(np.int64)
    _check_classes(metric, classes, max(2, width))
    return scores.reshape(-1, width), classes


def _binary(
    metric: object, outputs: Array, batch: Batch
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return scores (m,) and whether each label is 1; several columns are several questions."""
    scores, labels = np.asarray(outputs, np.float64), _labels(metric, outputs, batch)
    if labels.size != scores.size or labels.shape[0] != scores.shape[0]:
        expected = "a score for each label, 0 or 1; for one of several classes give class_id"
        raise _wrong_shapes(metric, outputs, batch, expected)
    _check_classes(metric, labels.reshape(-1), 2)
    return scores.reshape(-1), labels.reshape(-1) == 1


def _errors(metric: object, outputs: Array, batch: Batch) -> NDArray[np.float64]:
    values, targets = np.asarray(outputs, np.float64), _labels(metric, outputs, batch)
    if values.size != targets.size or len(values) != len(targets):
        raise _wrong_shapes(metric, outputs, batch, "outputs and targets of one shape")
    errors: NDArray[np.float64] = values - targets.reshape(values.shape)
    return errors


def _labels(metric: object, outputs: Array, batch: Batch) -> NDArray[Any]:
    labels = np.asarray(batch[-1])
    if len(batch) == 3 and labels.shape == np.shape(batch[0])[:1] and labels.dtype.kind == "f":
        beside = np.asarray(batch[1])  # of which these may be the weights
        if beside.dtype.kind in "iub" or (beside.ndim > 1 and beside.shape == np.shape(outputs)):
            labels = beside
    if np.ndim(outputs) == 0 or labels.ndim == 0 or len(batch) < 2:
        raise _wrong_shapes(metric, outputs, batch, "a row for each example, and labels")
    return labels


def _check_classes(metric: object, classes: NDArray[Any], count: int) -> None:
    if len(classes) and not (classes.min() >= 0 and classes.max() < count):
        wrong = classes.min() if classes.min() < 0 else classes.max()
        raise ConfigError(
            f"{metric!r} got class {wrong:g}; expected 0 to {count - 1}, as outputs have "
            f"{count} classes; correct the labels, or the model's outputs"
        )


def _wrong_shapes(metric: object, outputs: Array, batch: Batch, expected: str) -> ConfigError:
    labels = f"labels of shape {np.shape(batch[-1])}" if len(batch) > 1 else "no labels"
    return ConfigError(
        f"{metric!r} got outputs of shape {np.shape(outputs)} and {labels}; expected {expected}; "
        "correct what the model's predict() returns, or choose another metric"
    )


def _ratio(part: float, whole: float) -> float:
    return float(part / whole) if whole else float("nan")


def _ratios(parts: Sums, whole: float) -> Sums:
    shares: Sums = parts / (whole or np.nan)
    return shares
