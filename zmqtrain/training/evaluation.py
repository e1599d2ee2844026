"""Measuring a model on a whole dataset."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from zmqtrain.errors import ConfigError, DataError
from zmqtrain.models.base import Dataset, Model, Parameters
from zmqtrain.user_code import user_code

ROWS = 1024  # examples at a time


def evaluate(
    model: Model,
    parameters: Parameters,
    dataset: Dataset,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> dict[str, float]:
    """Return the model's measures, averaged over all examples; {} if cancelled.

    Raises:
        ConfigError, DataError: the model or the dataset raises, or the model returns no measures.
    """
    totals: dict[str, float] = {}
    for start in range(0, len(dataset), ROWS):
        if is_cancelled():
            return {}
        indices = np.arange(start, min(start + ROWS, len(dataset)))
        with user_code("take()", dataset, DataError):
            batch = dataset.take(indices)
        with user_code("metrics()", model):
            measures = model.metrics(parameters, batch)
        for name, value in _numbers(model, measures).items():
            totals[name] = totals.get(name, 0.0) + value * len(indices)
    return {name: total / len(dataset) for name, total in totals.items()}


def _numbers(model: Model, measures: dict[str, float]) -> dict[str, float]:
    try:
        return {name: float(value) for name, value in measures.items()}
    except (AttributeError, TypeError, ValueError):
        raise ConfigError(
            f"metrics() of {model!r} returned {measures!r:.80}; expected a dict of names and "
            'numbers, such as {"loss": 0.25}'
        ) from None
