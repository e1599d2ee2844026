"""Variables that a rule sees as a whole, in the memory of a shard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

import numpy as np
from numpy.typing import NDArray

from zmqtrain.compute.arrays import Flat
from zmqtrain.optim.clipping import sum_of_squares
from zmqtrain.optim.layers import Squares
from zmqtrain.optim.mean import Mean
from zmqtrain.optim.pipeline import Update
from zmqtrain.optim.runs import Absences, Run, own_count


class WholeVariable:
    """A variable of a shard whose direction a MatrixRule computes from all of it at once."""

    def __init__(
        self, update: Update, run: Run, parameters: Flat, slots: Mapping[str, Flat], out: Flat
    ) -> None:
        """``parameters``, ``slots``, ``out``: of the whole shard; ``out``: for directions."""
        own = replace(update.by_group()[run.group], fused=False, moving_average=None)
        self._shape, self._rule, self._exact = run.shape or (), own.rule, own.exact
        start = run.where.start
        self.where, self.number = slice(start, start + prod(self._shape)), run.variable
        self._parameters, self._out = parameters[self.where], out[self.where]
        self._slots = {slot.name: slots[slot.name][self.where] for slot in own.own_slots}
        self._bound, self._l2 = own.bind(self._parameters, self._slots), own.l2

    def measure(
        self, mean: Mean, step: int, absences: Absences | None, done: NDArray[np.bool_] | None
    ) -> Squares:
        """Set ``out`` to the direction of update ``step`` by a mean of the shard's gradients.

        ``done``: which elements of the shard an interrupted update has changed already, whose
        directions are not defined; None: there are none.
        """
        rule, count = own_count(self._rule, step, absences.missed[self.number] if absences else 0)
        w, old = self._parameters, tuple(self._slots.values())
        gradient = self._bound.gradient(mean.at(self.where))
        if self._l2:
            gradient += np.float32(self._l2) * w
        with np.errstate(all="ignore"):
            numbers = rule.hyperparameters(count)
            _, *slots = rule.formula(w, gradient, *old, *numbers)
            for before, slot in zip(old, slots, strict=True):
                if done is not None:
                    slot[done[self.where]] = before[done[self.where]]
            whole, *new = (array.reshape(self._shape) for array in (gradient, *slots))
            direction = rule.direction(whole, new, numbers, self._exact).reshape(-1)
        self._out[...] = direction
        return self.number, float(sum_of_squares(w)), float(sum_of_squares(direction))
