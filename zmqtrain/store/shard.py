"""A shard's memory: flat parameters, optimizer slots, the step's sum, a gradient slot a worker.

All arithmetic on parameters happens here. Nothing here decides; the orders come from the policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zmqtrain.optim import Update, new_slots
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
        self._update(self._gradients[worker])

    def accumulate(self, worker: int) -> None:
        """Add the worker's gradient to the step's sum."""
        if self.accumulated:
            self._sum += self._gradients[worker]
        else:
            self._sum[...] = self._gradients[worker]
        self.accumulated += 1

    def reduce(self, workers: tuple[int, ...]) -> None:
        """Apply the mean of the sum and of these workers' gradients, added in this order."""
        for worker in workers:
            self.accumulate(worker)
        self._sum *= np.float32(1.0 / self.accumulated)
        self.accumulated = 0
        self._update(self._sum)

    def snapshot(self) -> Snapshot:
        """Copy the memory as it is now."""
        slots = {name: slot.copy() for name, slot in self.slots.items()}
        return Snapshot(self.version, self.parameters.copy(), slots)

    def _update(self, gradient: Flat) -> None:
        self.rule.update(self.parameters, gradient, self.slots, self.version)
        self.version += 1


def all_finite(flat: Flat) -> bool:
    """Say whether no element is NaN or infinite, in one pass that allocates nothing.

    The dot product with itself is finite unless an element is not, or squares overflow; only then
    is every element looked at.
    """
    return bool(np.isfinite(np.dot(flat, flat))) or bool(np.isfinite(flat).all())
