"""The mean of gradients that an update gets, the rule that assigns it, and their sum.

All have the same bits on a CPU and on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

import numpy as np

from zmqtrain.compute.arrays import Flat
from zmqtrain.models.backend import is_on_gpu
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


def add_up(
    terms: Sequence[Flat],
    weights: Sequence[float],
    out: Flat,
    *,
    factor: float = 1,
    limit: float = inf,
) -> None:
    """Set ``out`` to the :func:`zmqtrain.optim.formula.total` of the terms, without warnings.

    ``terms``: at least one, all of shape (n,) like ``out``, which may be the first of them.
    """
    if is_on_gpu(out):
        from zmqtrain.optim.kernels import gpu

        gpu.add_up(terms, weights, factor, limit, out)
        return
    with np.errstate(all="ignore"):
        pairs = zip(terms, weights, strict=True)
        first, *others = (term if w == 1 else term * np.float32(w) for term, w in pairs)
        if others:
            np.add(first, others[0], out=out)
        else:
            out[...] = first
        for term in others[1:]:
            out += term
        if factor != 1:
            out *= np.float32(factor)
        if limit != inf:
            np.clip(out, -limit, limit, out=out)
