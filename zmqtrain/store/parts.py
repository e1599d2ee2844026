"""A shard in parts, which threads change side by side.

Where the parts begin follows from the shard's layout alone (segment_layout.py), and the arithmetic
on an element does not depend on its place. So a change that was begun by another number of threads
is finished bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zmqtrain.compute.arrays import Flat
from zmqtrain.optim import AVERAGE, FormulaRule, Slot, Update
from zmqtrain.optim.formula import Numbers
from zmqtrain.optim.pipeline import Piece, Pieces, Squares
from zmqtrain.optim.redo import Redo
from zmqtrain.store.arithmetic import Memory
from zmqtrain.store.segment_layout import PartLayout


class Mean(NamedTuple):
    """The sum of ``gradients``, each times its weight (None: all are 1), divided by ``divisor``."""

    gradients: Sequence[Flat]
    weights: Sequence[float] | None
    divisor: float


class Part:
    """The arithmetic on one part of a shard's trained variables.

    ``where``: its place in the shard. ``redo``: its copies and progress, if changes must survive a
    killed process. ``pieces``: of the whole shard, which elements are of which variable.
    """

    def __init__(
        self,
        memory: Memory,
        where: slice,
        redo: tuple[list[Flat], NDArray[np.int64]] | None,
        pieces: Pieces,
        update: Update,
    ) -> None:
        self._where = where
        parameters, self._sum = memory.parameters[where], memory.sum[where]
        slots = {slot.name: memory.slots[slot.name][where] for slot in update.slots}
        self._redo: Redo | None = None
        self._redo_sum: Redo | None = None
        if redo is not None:
            copies, progress = redo
            arrays = [parameters, *slots.values()]
            self._redo = Redo(arrays, copies[: len(arrays)], progress)
            self._redo_sum = Redo([self._sum], copies[:1], progress)
        self._update = update.bind(parameters, slots, self._redo, list(_within(where, pieces)))

    def begin(self) -> None:
        """Nothing of a new change is done."""
        if self._redo is not None:
            self._redo.begin()

    def resume(self, *, of_sum: bool) -> None:
        """Finish the block in which a killed process left an update, or the sum."""
        redo = self._redo_sum if of_sum else self._redo
        if redo is not None:
            redo.resume()

    def squares(self, mean: Mean, step: int) -> list[Squares]:
        """Return this part's share of the input to the factors of :meth:`update`."""
        return self._update.squares(self._own(mean), mean.divisor, step, mean.weights)

    def update(self, mean: Mean, step: int, factors: Flat | None) -> None:
        """Apply a mean of gradients of the whole shard, as update ``step``.

        ``factors``: of each variable, for a layered update.

        Raises:
            ConfigError: the update rule refuses; nothing was changed.
        """
        self._update.apply_mean(self._own(mean), mean.divisor, step, factors, mean.weights)

    def add(self, gradient: Flat, weight: float, *, begin: bool) -> None:
        """Add a weighted gradient of the whole shard to the sum, or begin the sum with it."""
        gradient, share = gradient[self._where], np.float32(weight)
        if self._redo_sum is None:
            _add(self._sum, gradient, share, begin, out=self._sum)
            return
        for block, (copy,) in self._redo_sum.blocks(len(self._sum)):
            _add(self._sum[block], gradient[block], share, begin, out=copy)

    def _own(self, mean: Mean) -> list[Flat]:
        return [gradient[self._where] for gradient in mean.gradients]


class StatePart(Part):
    """The arithmetic on a part of a shard's state: an update assigns it, whatever the optimizer.

    ``averaged``: it becomes the mean of the gradients' values, else that of the first gradient. The
    moving average of state is the state itself.
    """

    def __init__(
        self,
        memory: Memory,
        where: slice,
        redo: tuple[list[Flat], NDArray[np.int64]] | None,
        *,
        averaged: bool,
    ) -> None:
        averages = tuple(Slot(name, None) for name in memory.slots if name == AVERAGE)
        pieces = [Piece(where)]
        super().__init__(memory, where, redo, pieces, Update(Assign(averages), fused=False))
        self._averaged = averaged

    def update(self, mean: Mean, step: int, factors: Flat | None) -> None:
        super().update(mean if self._averaged else Mean(mean.gradients[:1], None, 1), step, None)

    def add(self, gradient: Flat, weight: float, *, begin: bool) -> None:
        if self._averaged or begin:
            super().add(gradient, weight if self._averaged else 1, begin=begin)


@dataclass(frozen=True)
class Assign(FormulaRule):
    """The gradient is the new value, also of the slots."""

    slots: tuple[Slot, ...] = ()

    def hyperparameters(self, step: int) -> Numbers:
        return ()

    @staticmethod
    def formula(w: Any, g: Any, *slots: Any) -> tuple[Any, ...]:
        return (g, *(g for _ in slots))


def part_of(
    memory: Memory,
    layout: PartLayout,
    redo: tuple[list[Flat], NDArray[np.int64]] | None,
    pieces: Pieces,
    update: Update,
) -> Part:
    """Return the arithmetic on one part of a shard."""
    if layout.how == "update":
        return Part(memory, layout.where, redo, pieces, update)
    return StatePart(memory, layout.where, redo, averaged=layout.how == "mean")


def _within(where: slice, pieces: Pieces) -> Iterator[Piece]:
    """Yield the pieces of a part, counted from its begin."""
    for piece in pieces:
        start, stop = max(piece.where.start, where.start), min(piece.where.stop, where.stop)
        if start < stop:
            yield piece._replace(where=slice(start - where.start, stop - where.start))


def _add(total: Flat, gradient: Flat, share: np.float32, begin: bool, out: Flat) -> None:
    if share != 1:
        gradient = gradient * share
    if begin:
        out[...] = gradient
    else:
        np.add(total, gradient, out=out)
