"""The factors of variables, by which a LayerRule moves them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np

from zmqtrain.compute.arrays import Flat
from zmqtrain.optim.base import Rule
from zmqtrain.optim.formula import LayerRule
from zmqtrain.optim.runs import Absences, own_count

Squares: TypeAlias = tuple[int, float, float]
"""A variable, and sums of squares of a run of it: of the parameters and of the direction."""


def factors_of(
    rules: Sequence[Rule],
    squares: Iterable[Squares],
    sizes: Sequence[int],
    step: int,
    absences: Absences | None = None,
) -> Flat:
    """Return the factor of each variable, by its rule, or 1; ``sizes``: numbers of elements."""
    sums = [(0.0, 0.0)] * len(sizes)
    for variable, of_parameters, of_direction in squares:
        before = sums[variable]
        sums[variable] = before[0] + of_parameters, before[1] + of_direction
    factors = []
    missed = [0] * len(sizes) if absences is None else absences.missed
    for rule, sums_of_it, size, own_missed in zip(rules, sums, sizes, missed, strict=True):
        own, count = own_count(rule, step, own_missed)
        is_layered = isinstance(own, LayerRule)
        factors.append(own.factor(sums_of_it, size, count) if is_layered else np.float32(1))
    return np.array(factors, np.float32)
