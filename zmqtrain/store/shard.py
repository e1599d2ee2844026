"""A shard's memory: flat parameters, optimizer slots, the step's sum, a gradient slot a worker.

All arithmetic on parameters happens here. Nothing here decides; the orders come from the policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zmqtrain.optim import Update, new_slots
from zmqtrain.optim.blocks import block_size, runs
from zmqtrain.store.layout import ShardLayout

Flat = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Copies of a shard's memory at one version."""

    version: int
    parameters: Flat
    slots: Mapping[str, Flat]


class Shard:
    """One ps's part of the model. ``version`` counts the updates applied to it."""

    def __init__(self, layout: ShardLayout, update: Update) -> None:
        self.layout = layout
        self.rule = update
        self.version = 0
        self.parameters: Flat = np.zeros(layout.size, np.float32)
        self.slots: dict[str, Flat] = {}
        self.accumulated = 0  # gradients in the sum
        self._sum: Flat = np.zeros(layout.size, np.float32)
        self._gradients: dict[int, Flat] = {}

    def initialize(
        self, parameters: Flat, slots: Mapping[str, Flat] | None = None, version: int = 0
    ) -> None:
        """Begin with these parameters (float32, shape (layout.size,)), copied."""
        self.parameters[...] = parameters
        self.slots = dict(slots) if slots is not None else new_slots(self.rule, self.parameters)
        self.version = version
        self.accumulated = 0

    def gradient_slot(self, worker: int) -> Flat:
        """Return the memory that takes this worker's gradient; it stays valid."""
        if worker not in self._gradients:
            self._gradients[worker] = np.empty(self.layout.size, np.float32)
        return self._gradients[worker]

    def apply(self, worker: int) -> None:
        """Apply the worker's gradient as one update."""
        self._update((self._gradients[worker],), count=1)

    def accumulate(self, worker: int) -> None:
        """Add the worker's gradient to the step's sum."""
        if self.accumulated:
            self._sum += self._gradients[worker]
        else:
            self._sum[...] = self._gradients[worker]
        self.accumulated += 1

    def reduce(self, workers: tuple[int, ...]) -> None:
        """Apply the mean of the sum and of these workers' gradients, added in this order."""
        gradients = tuple(self._gradients[worker] for worker in workers)
        count = self.accumulated + len(gradients)
        if self.accumulated:
            gradients = (self._sum, *gradients)
        self.accumulated = 0
        self._update(gradients, count)

    def snapshot(self) -> Snapshot:
        """Copy the memory as it is now."""
        slots = {name: slot.copy() for name, slot in self.slots.items()}
        return Snapshot(self.version, self.parameters.copy(), slots)

    def _update(self, gradients: tuple[Flat, ...], count: int) -> None:
        self.rule.update_by_mean(self.parameters, gradients, count, self.slots, self.version)
        self.version += 1


def all_finite(flat: Flat) -> bool:
    """Say whether no element is NaN or infinite, in one pass at the speed of the memory.

    The dot product with itself is finite unless an element is not, or squares overflow; only then
    are elements looked at, block by block up to the first bad one.
    """
    with np.errstate(over="ignore"):
        square = np.dot(flat, flat)
    if np.isfinite(square):
        return True
    return all(np.isfinite(flat[run]).all() for run in runs(len(flat), block_size(flat)))
