"""All that a ps does to its shard for one accepted gradient, in one pass over memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from zmqtrain.errors import ConfigError
from zmqtrain.optim import kernels
from zmqtrain.optim.base import Flat, Rule, Slot
from zmqtrain.optim.blocks import approach, block_size, blocks, runs
from zmqtrain.optim.checks import check_decay, check_non_negative

AVERAGE = "average"
"""The slot of the parameters' moving average."""

_ZERO = np.float32(0)

RUN_SIZE = 262_144
"""Elements of a mean of gradients, 1 MiB: in L2 or L3 when the rule reads it, and few calls."""


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
        self.bind(parameters, slots).apply(gradient, step)

    def bind(
        self, parameters: Flat, slots: Mapping[str, Flat], scratch: Flat | None = None
    ) -> BoundUpdate:
        """Return this update for memory that it will be applied to many times.

        ``scratch``: shape (2, m), to make means in, m at least the elements or ``RUN_SIZE``.
        """
        return BoundUpdate(self, parameters, slots, scratch)

    def warm_up(self, parameters: Flat) -> None:
        """Compile, or load, the kernels that updates of such memory need: up to a second each."""
        if isinstance(self.rule, Update):
            self.rule.warm_up(parameters)
        kernel = kernels.find(self.rule, parameters) if self.fused else None
        if kernel is not None:
            kernel.load(averaging=self.moving_average is not None)
        kernels.load_scaled_sum(parameters)

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
        scratch: Flat | None = None,
    ) -> None:
        self._update = update
        self._parameters = parameters
        self._slots = slots
        kernel = kernels.find(update.rule, parameters) if update.fused else None
        self._kernel: kernels.BoundKernel | None = None
        if kernel is not None:
            average = None if update.moving_average is None else slots[AVERAGE]
            self._kernel = kernel.bind(parameters, slots, average, np.float32(update.l2))
        self._runs: list[tuple[slice, BoundUpdate]] = []
        self._scratch = scratch

    def apply(self, gradient: Flat, step: int) -> None:
        """Apply one gradient of shape (n,), which is only read, as update ``step``."""
        update = self._update
        share = update.share(step + 1)
        if self._kernel is None:
            update.update_unfused(self._parameters, gradient, self._slots, share, step)
        else:
            self._kernel(gradient, _ZERO if share is None else share, step)

    def apply_mean(self, gradients: Sequence[Flat], count: int, step: int) -> None:
        """Apply, as one update, the sum of ``gradients`` in this order, divided by ``count``.

        ``gradients`` are at least one, of shape (n,), and only read. The mean is made and used run
        by run, so memory is passed over once.
        """
        if count == len(gradients) == 1:
            self.apply(gradients[0], step)
            return
        scratch = self._cut()
        for run, bound in self._runs:
            mean = kernels.mean(
                [gradient[run] for gradient in gradients],
                count,
                [buffer[: run.stop - run.start] for buffer in scratch],
            )
            bound.apply(mean, step)

    def _cut(self) -> Flat:
        """Bind the update to each run of the memory, once; return two buffers for a run's mean."""
        parameters, slots = self._parameters, self._slots
        size, length = len(parameters), block_size(parameters, host=RUN_SIZE)
        if not self._runs:
            for run in runs(size, length):
                state = {name: slot[run] for name, slot in slots.items()}
                self._runs.append((run, BoundUpdate(self._update, parameters[run], state)))
        if self._scratch is None:
            self._scratch = np.empty_like(parameters, shape=(2, min(size, length)))
        return self._scratch


def new_slots(rule: Rule, parameters: Flat) -> dict[str, Flat]:
    """Allocate a rule's slots for these parameters (shape (n,)), with their initial values."""
    return {
        slot.name: parameters.copy()
        if slot.initial is None
        else np.full_like(parameters, slot.initial)
        for slot in rule.slots
    }
