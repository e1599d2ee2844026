"""The weight of a batch: how much its mean loss, and the gradient of that, count among others.

It is the number by which the mean divides: that of examples, unless the model knows another one,
such as the number of tokens that have a label.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zmqtrain.errors import ConfigError
from zmqtrain.models.base import BaseModel, Batch
from zmqtrain.user_code import user_code

EMPTY = 2.0**-60
"""The weight of a batch in which nothing counts: loss and gradient are 0. Beside others it changes
no mean, and of such alone, whose state counts, there is a mean, too."""

LEAST, LIMIT = 1e-6, 2.0**53
"""Of the other weights: their quotients are float32."""


def weight_of(step: Any) -> float:
    """Return the ``weight`` of a step; None: it has the weight of its ``examples``."""
    return float(step.examples if step.weight is None else step.weight)


def weights_of(model: BaseModel, batch: Batch, examples: int) -> tuple[float, float]:
    """Return the weights of the batch's mean loss and of its other mean measures.

    Raises:
        ConfigError: the model returns no weight.
    """
    with user_code("weight()", model):
        found = model.weight(batch)
    weight = float(examples) if found is None else checked_weight(found, model)
    return weight, weight if model.weighs_measures else examples


def checked_weight(value: Any, owner: object) -> float:
    """Return the result of a ``weight(batch)``, EMPTY for 0.

    Raises:
        ConfigError: it is not a weight.
    """
    try:
        found = float(value)
    except (TypeError, ValueError, RuntimeError):
        found = -1.0
    if found not in (0, EMPTY) and not LEAST <= found < LIMIT:
        raise ConfigError(
            f"weight() of {owner!r} returned {value!r:.80}; expected 0, or a number from {LEAST:g} "
            f"to {LIMIT:.0e}: return the number by which the mean loss of a batch divides, such as "
            "that of tokens with a label"
        )
    return found or EMPTY


def weighted(value: float, weight: float) -> float:
    """Return a value times its weight; one of an empty batch, which may be NaN, is 0."""
    return 0.0 if weight == EMPTY else value * weight


def weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    return sum(map(weighted, values, weights)) / sum(weights)
