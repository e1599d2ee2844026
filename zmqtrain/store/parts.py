"""A shard in parts, which threads change side by side.

Where the parts begin follows from the shard's size alone (segment_layout.py), and the arithmetic on
an element does not depend on where it lies. So a change that was begun by another number of threads
is finished bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from zmqtrain.compute.arrays import Flat
from zmqtrain.optim import Update
from zmqtrain.optim.redo import Redo
from zmqtrain.store.arithmetic import Memory


class Part:
    """What is done to one part of a shard.

    ``redo``: its redo areas and progress, if a killed process is to leave it whole.
    """

    def __init__(
        self, memory: Memory, run: slice, redo: tuple[list[Flat], NDArray[np.int64]] | None
    ) -> None:
        self._run = run
        self._parameters, self._sum = memory.parameters[run], memory.sum[run]
        self._slots = {name: slot[run] for name, slot in memory.slots.items()}
        self._redo: Redo | None = None
        self._redo_sum: Redo | None = None
        if redo is not None:
            areas, progress = redo
            self._redo = Redo([self._parameters, *self._slots.values()], areas, progress)
            self._redo_sum = Redo([self._sum], areas[:1], progress)

    def bind(self, update: Update) -> None:
        """Update with this from now on."""
        self._update = update.bind(self._parameters, self._slots, self._redo)

    def begin(self) -> None:
        """Nothing of a new change is done."""
        if self._redo is not None:
            self._redo.begin()

    def resume(self, *, of_sum: bool) -> None:
        """Finish the run in which a killed process left an update, or the sum."""
        redo = self._redo_sum if of_sum else self._redo
        if redo is not None:
            redo.resume()

    def update(self, gradients: Sequence[Flat], count: int, step: int) -> None:
        """Apply the sum of gradients of the whole shard, divided by ``count``, as update ``step``.

        Raises:
            ConfigError: the update rule refuses; nothing was changed.
        """
        self._update.apply_mean([gradient[self._run] for gradient in gradients], count, step)

    def add(self, gradient: Flat, *, anew: bool) -> None:
        """Add a gradient of the whole shard to the sum, or begin the sum with it."""
        gradient = gradient[self._run]
        if self._redo_sum is None:
            _add(self._sum, gradient, anew, out=self._sum)
            return
        for run, (area,) in self._redo_sum.runs(len(self._sum)):
            _add(self._sum[run], gradient[run], anew, out=area)


def _add(total: Flat, gradient: Flat, anew: bool, out: Flat) -> None:
    if anew:
        out[...] = gradient
    else:
        np.add(total, gradient, out=out)
