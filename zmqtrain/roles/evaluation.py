"""Measuring a model on a whole dataset."""

from __future__ import annotations

import numpy as np

from zmqtrain.models.base import Dataset, Model, Parameters

ROWS = 1024  # examples at a time


def evaluate(model: Model, parameters: Parameters, dataset: Dataset) -> dict[str, float]:
    """Return the model's measures, averaged over all examples."""
    totals: dict[str, float] = {}
    for start in range(0, len(dataset), ROWS):
        indices = np.arange(start, min(start + ROWS, len(dataset)))
        for name, value in model.metrics(parameters, dataset.take(indices)).items():
            totals[name] = totals.get(name, 0.0) + value * len(indices)
    return {name: total / len(dataset) for name, total in totals.items()}
