"""Measuring a model on a whole dataset, and predicting with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from zmqtrain.data.subset import checked
from zmqtrain.errors import ConfigError, DataError
from zmqtrain.metrics import Measures, Metric, Totals
from zmqtrain.models.base import Array, Batch, Dataset, Model, Parameters
from zmqtrain.user_code import user_code

ROWS = 1024  # examples at a time, at most


def evaluate(
    model: Model,
    parameters: Parameters,
    dataset: Dataset,
    is_cancelled: Callable[[], bool] = lambda: False,
    metrics: Sequence[Metric] = (),
    rows: int = ROWS,
) -> Measures:
    """Return the model's measures, averaged over all examples, and the metrics; {} if cancelled.

    A metric replaces a measure of its name. ``rows``: examples at a time.

    Raises:
        ConfigError, DataError: the model, a metric or the dataset raises, or the model returns
            something wrong.
    """
    totals: dict[str, float] = {}
    of_metrics = Totals(metrics)
    for batch in _batches(dataset, rows):
        if is_cancelled():
            return {}
        with user_code("metrics()", model):
            measures = model.metrics(parameters, batch)
        for name, value in _numbers(model, measures).items():
            totals[name] = totals.get(name, 0.0) + value * len(batch[0])
        if metrics:
            of_metrics.add(outputs_of(model, parameters, batch), batch)
    own = {name: total / len(dataset) for name, total in totals.items()}
    return own | of_metrics.results() if len(dataset) else own


def predict(
    model: Model, parameters: Parameters, dataset: Dataset, rows: int = ROWS
) -> Array | tuple[Array, ...]:
    """Return the model's outputs for all examples, one row each; of several outputs a tuple.

    Raises:
        ConfigError, DataError: as for :func:`evaluate`; or there are no examples.
    """
    if not len(dataset):
        raise DataError("there are no examples to predict; expected at least one")
    parts = [outputs_of(model, parameters, batch) for batch in _batches(dataset, rows)]
    if isinstance(parts[0], tuple):
        return tuple(map(np.concatenate, zip(*parts, strict=True)))
    return np.concatenate(parts)


def outputs_of(model: Model, parameters: Parameters, batch: Batch) -> Any:
    """Return what the model predicts for a batch: an array, or a tuple of several outputs.

    Raises:
        ConfigError: the model cannot predict, raises, or returns no row for each example.
    """
    if not callable(getattr(model, "predict", None)):
        raise ConfigError(
            f"{model!r} has no method predict(parameters, batch), which metrics and predictions "
            "need; give it one that returns a row for each example"
        )
    with user_code("predict()", model):
        outputs = model.predict(parameters, batch)  # type: ignore[attr-defined]
    for array in outputs if isinstance(outputs, tuple) else (outputs,):
        if np.shape(array)[:1] != (len(batch[0]),):
            raise ConfigError(
                f"predict() of {model!r} returned outputs of shape {np.shape(array)} for "
                f"{len(batch[0])} examples; expected one row for each"
            )
    return outputs


def _batches(dataset: Dataset, rows: int) -> Iterator[Batch]:
    for start in range(0, len(dataset), rows):
        indices = np.arange(start, min(start + rows, len(dataset)))
        with user_code("take()", dataset, DataError):
            batch = dataset.take(indices)
        yield checked(batch, len(indices), dataset)


def _numbers(model: Model, measures: dict[str, float]) -> dict[str, float]:
    try:
        return {name: float(value) for name, value in measures.items()}
    except (AttributeError, TypeError, ValueError):
        raise ConfigError(
            f"metrics() of {model!r} returned {measures!r:.80}; expected a dict of names and "
            'numbers, such as {"loss": 0.25}'
        ) from None
