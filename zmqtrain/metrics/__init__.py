"""Measures of a model's outputs, each a sum over examples.

A metric turns a batch into an array of sums. Sums of parts of a data set are added, so a result
does not depend on the cuts. The outputs come from the model's ``predict``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from zmqtrain.errors import ConfigError
from zmqtrain.models.base import Array, Batch
from zmqtrain.models.checks import check_sizes
from zmqtrain.models.scores import (
    binary,
    check_probabilities,
    class_numbers,
    pairs,
    positive,
    predicted_classes,
    scores_and_classes,
    wrong_shapes,
)

Sums: TypeAlias = NDArray[np.float64]
Measures: TypeAlias = dict[str, Any]
"""Names and results: floats, or float64 arrays of a metric such as a confusion matrix."""


@runtime_checkable
class Metric(Protocol):
    """A measure of a model's outputs.

    A metric may have ``larger_is_better``, a bool: callbacks with mode "auto" follow it.
    """

    @property
    def name(self) -> str:
        """The name under which the result is shown."""

    def update(self, outputs: Array, batch: Batch) -> Sums:
        """Return the sums over one batch, always of the same shape.

        ``outputs``: the result of the model's ``predict`` for ``batch``, one row an example. The
        last array of ``batch`` holds the labels: weights behind them are left out. The model's
        ``labels_at`` is their index, unless a batch has two arrays.

        Raises:
            ConfigError: outputs or labels have a shape that this metric cannot measure.
        """

    def result(self, sums: Sums) -> float | Sums:
        """Return the measure over all examples whose sums were added; NaN if it has no value."""


class _Mean:
    """Sums a value over examples, and counts them."""

    def result(self, sums: Sums) -> float:
        return _ratio(*sums)


@dataclass(frozen=True, kw_only=True)
class _Classes:
    """A metric of class scores.

    ``ignore_index``: examples with this label do not count. ``axis``: axis of classes in outputs of
    more than two axes; by default it follows from the shape of the labels, or is the last one.
    """

    ignore_index: int | None = None
    axis: int | None = None
    larger_is_better: ClassVar[bool] = True


@dataclass(frozen=True)
class Accuracy(_Mean, _Classes):
    """Share of the examples whose class is right.

    Outputs with several columns, a score for each class, are right where the largest is that of the
    label: a class number, or a row that is one-hot. Outputs with one column are right where
    ``output > threshold`` equals the label, 0 or 1. The default threshold is 0.5, for
    probabilities; logits need ``threshold=0``. An example whose outputs hold NaN is not right.
    """

    threshold: float | None = None
    name: str = "accuracy"

    def update(self, outputs: Array, batch: Batch) -> Sums:
        scores, classes = scores_and_classes(self, outputs, batch)
        right = predicted_classes(self, scores) == classes
        return np.array([np.count_nonzero(right), len(right)], np.float64)


@dataclass(frozen=True)
class TopK(_Mean, _Classes):
    """Share of the examples whose class is among the ``k`` with the largest scores.

    Of equal scores the classes with lower numbers come first.
    """

    k: int = 5
    name: str = ""

    def __post_init__(self) -> None:
        check_sizes("TopK", k=self.k)
        object.__setattr__(self, "name", self.name or f"top_{self.k}_accuracy")

    def update(self, outputs: Array, batch: Batch) -> Sums:
        scores, classes = scores_and_classes(self, outputs, batch)
        own = scores[np.arange(len(classes)), classes][:, None]
        lower = np.arange(scores.shape[1]) < classes[:, None]
        before = ((scores > own) | ((scores == own) & lower)).sum(axis=1)
        found = (before < self.k) & ~np.isnan(scores).any(axis=1)
        return np.array([np.count_nonzero(found), len(classes)], np.float64)


@dataclass(frozen=True)
class _Detection(_Classes):
    """Counts of true positives, false positives and false negatives.

    Outputs are scores for labels 0 and 1: ``output > threshold`` is positive; the default threshold
    is 0.5, for probabilities. With ``class_id`` outputs and labels are those of :class:`Accuracy`,
    and a predicted ``class_id`` is positive.
    """

    threshold: float | None = None
    class_id: int | None = None
    _wrong: ClassVar[int]  # the index of the count that lowers the measure

    def update(self, outputs: Array, batch: Batch) -> Sums:
        if self.class_id is None:
            scores, truth = binary(self, outputs, batch)
            predicted = positive(self, scores)
        else:
            every, classes = scores_and_classes(self, outputs, batch)
            class_numbers(self, np.array([self.class_id]), max(2, every.shape[1]))
            predicted, truth = (
                predicted_classes(self, every) == self.class_id,
                classes == self.class_id,
            )
        counts = [predicted & truth, predicted & ~truth, ~predicted & truth]
        return np.array([np.count_nonzero(count) for count in counts], np.float64)

    def result(self, sums: Sums) -> float:
        return _ratio(sums[0], sums[0] + sums[self._wrong])


@dataclass(frozen=True)
class Precision(_Detection):
    """Share of the predicted positives that are positive: TP / (TP + FP).

    ``output > threshold`` predicts a positive; labels are 0 and 1. With ``class_id`` an example is
    positive if it is of that class.
    """

    name: str = "precision"
    _wrong = 1


@dataclass(frozen=True)
class Recall(_Detection):
    """Share of the positive examples that are found: TP / (TP + FN); see :class:`Precision`."""

    name: str = "recall"
    _wrong = 2


@dataclass(frozen=True)
class AUC:
    """Area under the ROC curve of scores for labels 0 and 1.

    The curve is taken at ``thresholds`` places, evenly from 0 to 1 with one below and one above,
    and is straight between them, as in Keras. Scores are probabilities; ``from_logits``: logits.
    """

    thresholds: int = 200
    from_logits: bool = False
    name: str = "auc"
    larger_is_better: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_sizes("AUC", thresholds=self.thresholds)
        if self.thresholds < 2:
            raise ConfigError(f"AUC: thresholds is {self.thresholds}; expected at least 2")

    def update(self, outputs: Array, batch: Batch) -> Sums:
        scores, truth = binary(self, outputs, batch)
        if self.from_logits:
            scores = 0.5 * (1 + np.tanh(scores / 2))  # the logistic function, without overflow
        else:
            check_probabilities(self, scores, "AUC(from_logits=True)")
        if np.isnan(scores).any():
            return np.full((2, self.thresholds + 1), np.nan)
        inner = np.arange(1, self.thresholds - 1) / (self.thresholds - 1)
        places = np.concatenate([[-np.inf], inner, [np.inf]])
        above = np.searchsorted(places, scores, side="left")  # number of thresholds below
        histograms = [
            np.bincount(above[which], minlength=self.thresholds + 1) for which in (truth, ~truth)
        ]
        return np.array(histograms, np.float64)

    def result(self, sums: Sums) -> float:
        above = sums[:, ::-1].cumsum(axis=1)[:, :-1]  # positives and negatives above a threshold
        found, false = (row / (row[-1] or np.nan) for row in above)
        return float(np.sum((found[1:] + found[:-1]) * np.diff(false)) / 2)


@dataclass(frozen=True)
class ConfusionMatrix(_Classes):
    """Number of examples of each class (row) by their predicted class (column).

    Outputs have a column for each of ``classes``; with one column there are the classes 0 and 1.
    Examples whose outputs hold NaN are not counted.
    """

    classes: int
    threshold: float | None = None
    name: str = "confusion_matrix"

    def __post_init__(self) -> None:
        check_sizes("ConfusionMatrix", classes=self.classes)

    def update(self, outputs: Array, batch: Batch) -> Sums:
        scores, truth = scores_and_classes(self, outputs, batch)
        if max(2, scores.shape[1]) != self.classes:
            raise wrong_shapes(self, outputs, batch, f"outputs for {self.classes} classes")
        predicted = predicted_classes(self, scores)
        places = (truth * self.classes + predicted)[predicted >= 0]
        cells = np.bincount(places, minlength=self.classes**2)
        return cells.reshape(self.classes, self.classes).astype(np.float64)

    def result(self, sums: Sums) -> Sums:
        return sums


@dataclass(frozen=True)
class _MeanError(_Mean):
    larger_is_better: ClassVar[bool] = False
    _power: ClassVar[int]

    def update(self, outputs: Array, batch: Batch) -> Sums:
        values, targets = pairs(self, outputs, batch, "outputs and targets of one shape")
        errors = np.abs(values - targets) ** self._power
        return np.array([np.sum(errors), errors.size], np.float64)


@dataclass(frozen=True)
class MeanSquaredError(_MeanError):
    """Mean of (output - target)^2 over examples and outputs."""

    name: str = "mean_squared_error"
    _power = 2


@dataclass(frozen=True)
class MeanAbsoluteError(_MeanError):
    """Mean of abs(output - target) over examples and outputs."""

    name: str = "mean_absolute_error"
    _power = 1


def checked(metrics: Sequence[Any]) -> tuple[Metric, ...]:
    """Return the metrics as a tuple.

    Raises:
        ConfigError: one is not a metric, or two have the same name.
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


_LAST_WORDS = {"accuracy": True, "acc": True, "mae": False, "mse": False, "rmse": False}
_NAMES = {
    **dict.fromkeys(("auc", "precision", "recall", "f1", "f1_score"), True),
    "perplexity": False,
}
"""Whether larger is better for measures of these names, or names that end with these words."""


def larger_is_better(name: str, directions: Mapping[str, bool]) -> bool | None:
    """Return whether a larger value of a measure, also with ``val_``, is better; None: unknown.

    ``directions``: those of known metrics, by name; they count more than words in names.
    """
    measure = name.removeprefix("val_")
    if measure in directions:
        return directions[measure]
    if measure.startswith(("neg_", "negative_")):  # of scores that have changed their sign
        return None
    if measure.endswith(("loss", "error")):
        return False
    return _NAMES.get(measure, _LAST_WORDS.get(measure.rpartition("_")[2]))


def numbers(measures: Mapping[str, Any]) -> dict[str, float]:
    """Return the measures that are numbers, without arrays and callbacks' texts."""
    return {
        name: float(value)
        for name, value in measures.items()
        if not isinstance(value, str | None) and np.ndim(value) == 0
    }


def _ratio(part: float, whole: float) -> float:
    return float(part / whole) if whole else float("nan")
