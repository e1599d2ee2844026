"""A shard: the arithmetic on one ps's segment.

All arithmetic on parameters happens here. Nothing here decides; the orders come from the policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

import numpy as np

from zmqtrain.optim import Update
from zmqtrain.optim.blocks import block_size, runs
from zmqtrain.store.layout import ShardLayout
from zmqtrain.store.segment import CLOCK, VERSION, Flat, Segment, SegmentLayout


class Shard:
    """One ps's part of the model, in private memory unless a segment is given.

    A worker's gradient counts from where it lies: the worker is *staged* at a gradient of the
    segment, by number, when its push has arrived.
    """

    def __init__(self, layout: ShardLayout, update: Update, segment: Segment | None = None) -> None:
        self.layout = layout
        self.rule = update
        self.segment = segment or Segment.private(segment_layout(layout, update))
        self.accumulated = 0  # gradients in the sum
        self._update = update.bind(self.parameters, self.slots)
        self._staged: dict[int, int] = {}  # worker -> number of its gradient

    @property
    def version(self) -> int:
        """Updates applied."""
        return self.segment.words[VERSION]

    @property
    def parameters(self) -> Flat:
        return self.segment.parameters

    @property
    def slots(self) -> dict[str, Flat]:
        return self.segment.slots

    def initialize(
        self, parameters: Flat, slots: Mapping[str, Flat] | None = None, version: int = 0
    ) -> None:
        """Begin with these parameters (float32, shape (layout.size,)), copied."""
        self.segment.words[CLOCK] += 1
        np.copyto(self.parameters, parameters)
        for slot in self.rule.slots:
            initial = parameters if slot.initial is None else slot.initial
            np.copyto(self.slots[slot.name], slots[slot.name] if slots is not None else initial)
        self.segment.words[VERSION] = version
        self.segment.words[CLOCK] += 1
        self.accumulated = 0
        self._staged.clear()

    def stage(self, worker: int, number: int) -> None:
        """Take gradient ``number`` of the segment for the worker's contribution."""
        self._staged[worker] = number

    def is_staged(self, number: int) -> bool:
        """Say whether gradient ``number`` may still be needed."""
        return number in self._staged.values()

    def apply(self, worker: int) -> None:
        """Apply the worker's gradient as one update."""
        self._apply((self._gradient_of(worker),), count=1)

    def accumulate(self, worker: int) -> None:
        """Add the worker's gradient to the step's sum."""
        if self.accumulated:
            self.segment.sum += self._gradient_of(worker)
        else:
            np.copyto(self.segment.sum, self._gradient_of(worker))
        self.accumulated += 1

    def reduce(self, workers: tuple[int, ...]) -> None:
        """Apply the mean of the sum and of these workers' gradients, added in this order."""
        gradients = tuple(self._gradient_of(worker) for worker in workers)
        count = self.accumulated + len(gradients)
        if self.accumulated:
            gradients = (self.segment.sum, *gradients)
        self.accumulated = 0
        self._apply(gradients, count)

    def _gradient_of(self, worker: int) -> Flat:
        return self.segment.gradient(self._staged[worker])

    def _apply(self, gradients: tuple[Flat, ...], count: int) -> None:
        words = self.segment.words
        words[CLOCK] += 1
        try:
            self._update.apply_mean(gradients, count, words[VERSION])
            words[VERSION] += 1
        finally:
            words[CLOCK] += 1


def segment_layout(layout: ShardLayout, update: Update) -> SegmentLayout:
    """Return the layout of the segment that such a shard lies in."""
    return SegmentLayout(layout.size, [slot.name for slot in update.slots])


def all_finite(flat: Flat) -> bool:
    """Say whether no element is NaN or infinite, in one pass at the speed of the memory.

    The dot product with itself is finite unless an element is not, or squares overflow; only then
    are elements looked at, block by block up to the first bad one.
    """
    with np.errstate(over="ignore"):
        square = np.dot(flat, flat)
    if isfinite(square):
        return True
    return all(np.isfinite(flat[run]).all() for run in runs(len(flat), block_size(flat)))
