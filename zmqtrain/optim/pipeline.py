"""All that a ps does to its shard for one accepted gradient, in one pass over memory."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from zmqtrain.compute.arrays import Flat
from zmqtrain.errors import ConfigError
from zmqtrain.optim import kernels
from zmqtrain.optim.base import Rule, Slot
from zmqtrain.optim.blocks import approach, block_size, blocks, runs
from zmqtrain.optim.checks import check_decay, check_non_negative
from zmqtrain.optim.redo import Redo

AVERAGE = "average"
"""The slot of the parameters' moving average."""

_ZERO = np.float32(0)

RUN_SIZE = 131_072
"""Elements of a mean of gradients, 512 KiB: in L2 when the rule reads it, and few calls."""


@dataclass(frozen=True, slots=True)
class Update:
    """A rule with L2 regularisation before it and a moving average behind it; itself a rule.

    With w the parameters, g the gradient, and a the slot "average", w's initial value at first:

        g = g + l2 * w                  the loss l2 * sum(w^2) / 2 of tf.contrib's l2_regularizer;
                                        Keras's regularizers.l2(l) is l2 = 2 * l
        the rule
        a += (1 - d) * (w - a)          with d = min(moving_average, (1 + k) / (10 + k))

    k is the number of updates including this one: tf.train.ExponentialMovingAverage with
    ``num_updates=global_step``, which TensorFlow's models run after the update. Without
    ``moving_average`` there is no such slot. Both act on every parameter, biases included.

    Non-finite values go through without a warning: they are counted where gradients arrive.

    zmqtrain's own rules run as one fused kernel, with the same result. ``fused=False`` keeps to
    the rule's ``update``; it is no part of what the update is, so neither of its text.
    """

    rule: Rule
    l2: float = 0.0
    moving_average: float | None = None
    fused: bool = field(default=True, kw_only=True, repr=False, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.rule, type) or not isinstance(self.rule, Rule):
            raise ConfigError(
                f"Update: rule is {self.rule!r}; expected an update rule such as SGD(0.01); "
                "correct optimizer in the job"
            )
        check_non_negative(self, "l2")
        if self.moving_average is None:
            return
        check_decay(self, "moving_average")
        if any(slot.name == AVERAGE for slot in self.rule.slots):
            raise ConfigError(
                f"Update: {self.rule!r} already has a slot {AVERAGE!r}, in which moving_average "
                "would be kept; leave moving_average out or rename the rule's slot"
            )

    @property
    def slots(self) -> tuple[Slot, ...]:
        own = () if self.moving_average is None else (Slot(AVERAGE, None),)
        return (*self.rule.slots, *own)

    def update(
        self, parameters: Flat, gradient: Flat, slots: Mapping[str, Flat], step: int
    ) -> None:
        self.bind(parameters, slots).apply_mean([gradient], 1, step)

    def bind(
        self, parameters: Flat, slots: Mapping[str, Flat], redo: Redo | None = None
    ) -> BoundUpdate:
        """Return this update for memory that it will be applied to many times.

        ``redo``: of ``parameters`` and every slot, if a killed process is to leave them whole.
        """
        return BoundUpdate(self, parameters, slots, redo)

    def warm_up(self, parameters: Flat, *, guarded: bool = False) -> None:
        """Load the kernels that updates of such memory need, or compile them: seconds each."""
        memory = parameters[:0]
        slots = new_slots(self, memory)
        arrays = [memory, *slots.values()]
        redo = Redo(arrays, arrays, np.zeros(2, np.int64)) if guarded else None
        with contextlib.suppress(ConfigError):  # the update itself will tell
            self.bind(memory, slots, redo).apply_mean([memory], 1, 0)
        if self.fused:
            kernels.scaled_sum(memory, memory, memory, _ZERO)

    def update_unfused(
        self,
        parameters: Flat,
        gradient: Flat,
        slots: Mapping[str, Flat],
        share: np.float32 | None,
        step: int,
    ) -> None:
        """Apply the rule as it is written, block by block: the reference of the kernels."""
        l2 = np.float32(self.l2)
        with np.errstate(all="ignore"):
            for w, g, state, (x,) in blocks(parameters, gradient, slots, scratch=1):
                if l2:
                    np.multiply(w, l2, out=x)
                    x += g
                self.rule.update(w, x if l2 else g, state, step)
                if share is not None:
                    approach(state[AVERAGE], w, share, scratch=x)

    def share(self, updates: int) -> np.float32 | None:
        """Return 1 - d of the average after this many updates."""
        if self.moving_average is None:
            return None
        return np.float32(1 - min(self.moving_average, (1 + updates) / (10 + updates)))


class BoundUpdate:
    """An update and the memory of one shard.

    What does not change from one update to the next is looked up, and what is needed beside the
    memory is allocated, once.
    """

    def __init__(
        self,
        update: Update,
        parameters: Flat,
        slots: Mapping[str, Flat],
        redo: Redo | None = None,
    ) -> None:
        self._update = update
        self._parameters = parameters
        self._slots = slots
        self._redo = redo
        kernel = kernels.find(update.rule, parameters) if update.fused else None
        self._kernel: kernels.BoundKernel | None = None
        if kernel is not None:
            average = None if update.moving_average is None else AVERAGE
            self._kernel = kernel.bind(parameters, slots, average, np.float32(update.l2), redo)
        self._scratch: Flat | None = None

    def apply_mean(self, gradients: Sequence[Flat], count: int, step: int) -> None:
        """Apply, as update ``step``, the sum of ``gradients`` in this order, divided by ``count``.

        ``gradients`` are at least one, of shape (n,), and only read. The mean is made and used run
        by run, so memory is passed over once. A guarded update goes on where it was interrupted.
        """
        share = self._update.share(step + 1)
        size, start = len(self._parameters), 0 if self._redo is None else self._redo.done
        if count == len(gradients) == 1 or not size:
            self._apply(gradients[0][start:] if start else gradients[0], share, step, start)
            return
        length = block_size(self._parameters, host=RUN_SIZE)
        if self._scratch is None:
            self._scratch = np.empty_like(self._parameters, shape=(2, min(size, length)))
        for run in runs(size, length, start):
            parts = [gradient[run] for gradient in gradients]
            scratch = [buffer[: run.stop - run.start] for buffer in self._scratch]
            mean = kernels.mean(parts, count, scratch, fused=self._update.fused)
            self._apply(mean, share, step, run.start)

    def _apply(self, gradient: Flat, share: np.float32 | None, step: int, start: int) -> None:
        """Apply the gradient of the run that begins at ``start``."""
        if self._kernel is not None:
            self._kernel(gradient, _ZERO if share is None else share, step, start)
            return
        update, run = self._update.update_unfused, slice(start, start + len(gradient))
        slots = {name: slot[run] for name, slot in self._slots.items()}
        if self._redo is None or not len(gradient):
            update(self._parameters[run], gradient, slots, share, step)
            return
        for part, (parameters, *areas) in self._redo.runs(run.stop):
            np.copyto(parameters, self._parameters[part])
            for area, slot in zip(areas, self._slots.values(), strict=True):
                np.copyto(area, slot[part])
            beside = dict(zip(self._slots, areas, strict=True))
            update(
                parameters, gradient[part.start - start : part.stop - start], beside, share, step
            )


def new_slots(rule: Rule, parameters: Flat) -> dict[str, Flat]:
    """Allocate a rule's slots for these parameters (shape (n,)), with their initial values."""
    return {
        slot.name: parameters.copy()
        if slot.initial is None
        else np.full_like(parameters, slot.initial)
        for slot in rule.slots
    }
