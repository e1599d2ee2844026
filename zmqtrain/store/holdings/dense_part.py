"""The arrays of a dense block, on the processor that changes them, and one thread's part of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zmqtrain.compute.arrays import Flat
from zmqtrain.compute.device import Cpu, Device
from zmqtrain.optim import AVERAGE, BoundUpdate, Slot, Update
from zmqtrain.optim.mean import Assign, Mean, add_up
from zmqtrain.optim.outer import RESIDUAL
from zmqtrain.optim.redo import Redo
from zmqtrain.optim.runs import Run, Runs
from zmqtrain.store.changes import Change
from zmqtrain.store.segment import Segment
from zmqtrain.store.segment_layout import PartLayout


class DeviceArrays:
    """Arrays of shape (size,), all on one processor: those of a segment, or copies of them.

    With a device, the segment is where gradients come in and parameters are read; the slots and the
    sum are on the device alone until they are read.
    """

    def __init__(self, segment: Segment, device: Device | None = None) -> None:
        """``device``: None for the segment itself."""
        self._segment = segment
        self._device = device or Cpu()
        slots = segment.slots
        self.parameters, self.sum, *twins = self._device.twins(
            [segment.parameters, segment.sum, *slots.values()]
        )
        self.slots: dict[str, Any] = dict(zip(slots, twins, strict=True))
        self._gradients: dict[int, Any] = {}
        read = [name for name in slots if name == AVERAGE]
        self._read = [segment.parameters, *(slots[name] for name in read)]
        self._to_read = [self.parameters, *(self.slots[name] for name in read)]

    def gradient(self, number: int) -> Any:
        """Return the current values of gradient ``number`` of the segment."""
        flat = self._segment.gradient(number)
        if number not in self._gradients:
            (self._gradients[number],) = self._device.twins([flat])
        self._device.load([flat], [self._gradients[number]])
        self._device.wait()  # its worker may write the next one when this one is added up
        return self._gradients[number]

    def load(self) -> None:
        """Take over the segment's parameters and slots."""
        flats = [self._segment.parameters, *self._segment.slots.values()]
        self._device.load(flats, [self.parameters, *self.slots.values()])
        self._device.wait()

    def publish(self) -> None:
        """Copy the values that tasks read after every update to the segment."""
        self._device.store(self._to_read, self._read)

    def publish_slots(self) -> None:
        """Copy all slots to the segment."""
        self._device.store(list(self.slots.values()), list(self._segment.slots.values()))


class Part:
    """One part of the block, bound to its memory.

    State is assigned, whatever the rule: ``how`` says whether it becomes the mean of the gradients'
    values or the first one's. The moving average of state is the state itself.
    """

    def __init__(
        self,
        arrays: DeviceArrays,
        layout: PartLayout,
        redo: tuple[list[Flat], NDArray[np.int64]] | None,
        runs: Runs,
        update: Update,
    ) -> None:
        """``redo``: copies and progress, if changes must survive a killed process."""
        self.where, self._how = where, how = layout.where, layout.how
        self.is_trained = how == "update"
        if not self.is_trained:
            averages = tuple(Slot(name, None) for name in arrays.slots if name == AVERAGE)
            update, runs = Update(Assign(averages), fused=False), [Run(where)]
        parameters, self._sum = arrays.parameters[where], arrays.sum[where]
        slots = {slot.name: arrays.slots[slot.name][where] for slot in update.slots}
        self._redo: Redo | None = None
        self._redo_of_sum: Redo | None = None
        if redo is not None:
            copies, progress = redo
            changed = [parameters, *slots.values()]
            self._redo = Redo(changed, copies[: len(changed)], progress)
            self._redo_of_sum = Redo([self._sum], copies[:1], progress)
        self._settled = [parameters, *([slots[RESIDUAL]] if RESIDUAL in slots else [])]
        of_settled = [0, *([1 + [*slots].index(RESIDUAL)] if RESIDUAL in slots else [])]
        self._redo_of_settling = self._redo and self._redo.of(of_settled)
        own = list(_within(where, runs))
        self.bound = update.bind(parameters, slots, self._redo, own)
        alone = [run._replace(group=0) for run in own]
        given = parameters, slots, self._redo, alone  # not self, whose memory is freed at once

        @lru_cache(16)  # four for each number of workers
        def outer(among: int, cycle: int) -> BoundUpdate:
            rule = replace(update.outer, among=among, cycle=cycle)
            return Update(rule, fused=update.fused).bind(*given)

        self._outer = outer

    def bound_for(self, change: Change) -> BoundUpdate:
        """Return the update that makes this change."""
        if change.local_steps and self.is_trained:
            return self._outer(change.among, change.cycle)
        return self.bound

    def own(self, mean: Mean, clip: float = 1.0) -> Mean:
        """Return the part of a mean of the whole block; ``clip``: factor of trained variables."""
        if self._how == "first":
            mean = Mean(mean.gradients[:1])
        elif clip != 1:
            mean = mean._replace(clip=clip)
        return mean.at(self.where)

    @property
    def done(self) -> int:
        """Number of elements that a crash-safe change has changed, from the first one on."""
        return 0 if self._redo is None else self._redo.done

    def begin(self) -> None:
        """Note that nothing of the next change is made."""
        if self._redo is not None:
            self._redo.begin()

    def resume(self, *, of_sum: bool, bound: BoundUpdate) -> None:
        """Finish the block in which a killed process left an update (``bound``), or the sum."""
        if not of_sum:
            bound.resume()
        elif self._redo_of_sum is not None:
            self._redo_of_sum.resume()

    def settle(self, target: Flat) -> None:
        """Move the parameters to their part of ``target``; the residual takes up the rest."""
        parameters, *residuals = self._settled
        own, size = target[self.where], len(parameters)
        whole = [(slice(0, size), self._settled)]
        blocks = self._redo_of_settling.blocks(size) if self._redo_of_settling else whole
        for block, (moved, *rests) in blocks:
            rest = parameters[block] - own[block]
            for residual, out in zip(residuals, rests, strict=True):
                np.add(residual[block], rest, out=out)
            np.copyto(moved, own[block])

    def resume_settling(self) -> None:
        """Finish the block in which a killed process was settling."""
        if self._redo_of_settling is not None:
            self._redo_of_settling.resume()

    def add(self, mean: Mean, *, begin: bool) -> None:
        """Add the only gradient, weighted, to the sum of the step, or begin the sum with it."""
        if self._how == "first" and not begin:
            return
        terms, weights = [*mean.gradients], [*(mean.weights or (1.0,))]
        if not begin:
            terms, weights = [self._sum, *terms], [1.0, *weights]
        if self._redo_of_sum is None:
            add_up(terms, weights, self._sum)
            return
        for block, (copy,) in self._redo_of_sum.blocks(len(self._sum)):
            add_up([term[block] for term in terms], weights, copy)


def _within(where: slice, runs: Runs) -> Iterator[Run]:
    """Yield the runs of a part, counted from its begin."""
    for run in runs:
        start, stop = max(run.where.start, where.start), min(run.where.stop, where.stop)
        if start < stop:
            yield run._replace(where=slice(start - where.start, stop - where.start))
