"""Sums of metrics and of other measures, over batches and workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from zmqtrain.errors import ConfigError
from zmqtrain.metrics import Measures, Metric, Sums
from zmqtrain.models.base import Array, Batch, as_model
from zmqtrain.models.checks import labels_at
from zmqtrain.models.scores import fitting_axes
from zmqtrain.user_code import user_code


class Totals:
    """The sums of several metrics over the batches so far."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics
        self.sums: dict[str, Sums] = {}  # by the names of the metrics

    def add(self, outputs: Array, batch: Batch, model: object = None) -> None:
        """Count one batch of a model.

        Raises:
            ConfigError: a metric raises, or cannot measure such outputs, or no labels are known.
        """
        for metric in self._metrics:
            self._add(metric, sums_of(metric, outputs, batch, model))

    def merge(self, sums: Mapping[str, Sums]) -> None:
        """Add these sums.

        Raises:
            ConfigError: they have another shape.
        """
        for metric in self._metrics:
            self._add(metric, sums[metric.name])

    def _add(self, metric: Metric, sums: Sums) -> None:
        before = self.sums.setdefault(metric.name, np.zeros_like(sums))
        if np.shape(sums) != before.shape:
            raise _uneven(metric, before, sums)
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


def sums_of(
    metric: Metric, outputs: Array, batch: Batch, model: object, is_weighted: bool = False
) -> Sums:
    """Return the sums of a metric over one batch of a model; see :func:`labels_at`.

    Raises:
        ConfigError: as for :meth:`Totals.add`.
    """
    if not getattr(metric, "takes_whole_batch", False):
        batch = batch[: labels_at(model, batch, metric, is_weighted) + 1]
    if as_model(model).has_classes_second and getattr(metric, "axis", 0) is None:
        shapes = np.shape(outputs), np.shape(batch[-1])
        if len(fitting_axes(*shapes)) > 1:
            raise ConfigError(
                f"{metric!r} got outputs of shape {shapes[0]} and labels of shape {shapes[1]}; "
                "either the second axis or the last one may have the classes; give axis=1, as "
                "PyTorch's losses have it, or axis=-1"
            )
    with user_code("update()", metric):
        return metric.update(outputs, batch)


def check_sums(
    metric: Metric, outputs: Any, batch: Batch, model: object, is_weighted: bool = False
) -> None:
    """Check that a metric's result for a batch is the sum of its results for two parts.

    Raises:
        ConfigError: it is not a sum, but a mean, for instance; or as for :func:`sums_of`.
    """
    if getattr(metric, "takes_whole_batch", False):
        return
    labels_at(model, batch, metric, is_weighted)
    if len(batch[0]) < 2:
        return

    def of(rows: slice) -> Sums:
        is_tuple = isinstance(outputs, tuple)
        some = tuple(array[rows] for array in outputs) if is_tuple else outputs[rows]
        part = tuple(array[rows] for array in batch)
        return np.asarray(sums_of(metric, some, part, model, is_weighted), np.float64)

    whole, first, rest = map(of, (slice(None), slice(1), slice(1, None)))
    if whole.shape != rest.shape:
        raise _uneven(metric, whole, rest)
    if np.isclose(whole, first + rest, 0, 1e-3 * (abs(first) + abs(rest)), equal_nan=True).all():
        return
    raise ConfigError(
        f"update() of {metric!r} returned {whole.tolist()} for {len(batch[0])} examples, and "
        f"{first.tolist()} and {rest.tolist()} for the first and the others; expected sums, so "
        "that both add up: return the sum of a value and the number of examples, and divide them "
        "in result()"
    )


def added(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """Return the sums by the names that both have."""
    return {name: value + other[name] for name, value in one.items() if name in other}


def gained(sums: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """Return how much sums have grown."""
    return {name: value - before.get(name, 0.0) for name, value in sums.items()}


def _uneven(metric: Metric, one: Sums, other: Sums) -> ConfigError:
    return ConfigError(
        f"update() of {metric!r} returned arrays of the shapes {np.shape(one)} and "
        f"{np.shape(other)}; expected the same for each batch: sums over its examples"
    )
