"""The mean of gradients that an update gets, and the rule that assigns it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from zmqtrain.compute.arrays import Flat
from zmqtrain.optim.base import Slot
from zmqtrain.optim.formula import FormulaRule, Numbers


class Mean(NamedTuple):
    """The sum of ``gradients`` in this order, each times its weight, divided by ``divisor``.

    ``gradients``: at least one, all of shape (n,). ``weights``: None if all are 1. ``clip``: the
    factor that limits the mean's norm.
    """

    gradients: Sequence[Flat]
    divisor: float = 1
    weights: Sequence[float] | None = None
    clip: float = 1

    @classmethod
    def weighted(cls, gradients: Sequence[Flat], divisor: float, weights: Sequence[float]) -> Mean:
        """Return the mean with these weights; if all are 1, nothing will be multiplied by them."""
        is_even = weights.count(1) == len(weights)
        return cls(gradients, divisor, None if is_even else weights)

    @classmethod
    def of(cls, gradients: Sequence[Flat], weights: Sequence[float]) -> Mean:
        """Return the mean of gradients that count with these weights."""
        unit = max(weights)
        return cls.weighted(gradients, sum(weights) / unit, [each / unit for each in weights])

    def at(self, where: slice) -> Mean:
        """Return the mean of these elements."""
        gradients, divisor, weights, clip = self
        return Mean([gradient[where] for gradient in gradients], divisor, weights, clip)


@dataclass(frozen=True)
class Assign(FormulaRule):
    """A rule by which the mean becomes the new value, also of the slots."""

    slots: tuple[Slot, ...] = ()

    def hyperparameters(self, step: int) -> Numbers:
        return ()

    @staticmethod
    def formula(w: Any, g: Any, *slots: Any) -> tuple[Any, ...]:
        return (g, *(g for _ in slots))
