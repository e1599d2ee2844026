"""A shard in parts, which threads change side by side.

Where the parts begin follows from the shard's size alone (segment_layout.py), and the arithmetic on
an element does not depend on its place. So a change that was begun by another number of threads
is finished bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from zmqtrain.compute.arrays import Flat
from zmqtrain.optim import Update
from zmqtrain.optim.pipeline import Pieces, Squares
from zmqtrain.optim.redo import Redo
from zmqtrain.store.arithmetic import Memory


class Part:
    """The arithmetic on one part of a shard.

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
        slots = {name: slot[where] for name, slot in memory.slots.items()}
        self._redo: Redo | None = None
        self._redo_sum: Redo | None = None
        if redo is not None:
            copies, progress = redo
            self._redo = Redo([parameters, *slots.values()], copies, progress)
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

    def squares(self, gradients: Sequence[Flat], count: int, step: int) -> list[Squares]:
        """Return this part's share of the input to the factors of :meth:`update`."""
        return self._update.squares(self._own(gradients), count, step)

    def update(
        self, gradients: Sequence[Flat], count: int, step: int, factors: Flat | None
    ) -> None:
        """Apply the sum of gradients of the whole shard, divided by ``count``, as update ``step``.

        ``factors``: of each variable, for a layered update.

        Raises:
            ConfigError: the update rule refuses; nothing was changed.
        """
        self._update.apply_mean(self._own(gradients), count, step, factors)

    def add(self, gradient: Flat, *, begin: bool) -> None:
        """Add a gradient of the whole shard to the sum, or begin the sum with it."""
        gradient = gradient[self._where]
        if self._redo_sum is None:
            _add(self._sum, gradient, begin, out=self._sum)
            return
        for block, (copy,) in self._redo_sum.blocks(len(self._sum)):
            _add(self._sum[block], gradient[block], begin, out=copy)

    def _own(self, gradients: Sequence[Flat]) -> list[Flat]:
        return [gradient[self._where] for gradient in gradients]


def _within(where: slice, pieces: Pieces) -> Iterator[tuple[slice, int]]:
    """Yield the pieces of a part, counted from its begin."""
    for piece, variable in pieces:
        start, stop = max(piece.start, where.start), min(piece.stop, where.stop)
        if start < stop:
            yield slice(start - where.start, stop - where.start), variable


def _add(total: Flat, gradient: Flat, begin: bool, out: Flat) -> None:
    if begin:
        out[...] = gradient
    else:
        np.add(total, gradient, out=out)
