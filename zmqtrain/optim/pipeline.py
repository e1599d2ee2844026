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
        share = self._share(step + 1)
        kernel = kernels.find(self.rule, parameters) if self.fused else None
        if kernel is None:
            self._update_unfused(parameters, gradient, slots, share, step)
            return
        average = None if share is None else slots[AVERAGE]
        l2 = np.float32(self.l2)
        kernel.update(parameters, gradient, slots, average, share or np.float32(0), l2, step)

    def update_by_mean(
        self,
        parameters: Flat,
        gradients: Sequence[Flat],
        count: int,
        slots: Mapping[str, Flat],
        step: int,
    ) -> None:
        """Apply, as one update, the sum of ``gradients`` in this order, divided by ``count``.

        ``gradients`` are at least one, of shape (n,) as ``parameters``, and only read. The mean
        is made and used run by run, so memory is passed over once, and little is allocated.
        """
        if count == len(gradients) == 1:
            self.update(parameters, gradients[0], slots, step)
            return
        size, length = len(parameters), block_size(parameters, host=RUN_SIZE)
        scratch = np.empty_like(parameters, shape=(2, min(size, length)))
        for run in runs(size, length):
            mean = kernels.mean(
                [gradient[run] for gradient in gradients],
                count,
                [buffer[: run.stop - run.start] for buffer in scratch],
            )
            self.update(
                parameters[run], mean, {name: slot[run] for name, slot in slots.items()}, step
            )

    def warm_up(self, parameters: Flat) -> None:
        """Compile, or load, the kernels that updates of such memory need: up to a second each."""
        if isinstance(self.rule, Update):
            self.rule.warm_up(parameters)
        kernel = kernels.find(self.rule, parameters) if self.fused else None
        if kernel is not None:
            kernel.load(averaging=self.moving_average is not None)
        kernels.load_scaled_sum(parameters)

    def _update_unfused(
        self,
        parameters: Flat,
        gradient: Flat,
        slots: Mapping[str, Flat],
        share: np.float32 | None,
        step: int,
    ) -> None:
        l2 = np.float32(self.l2)
        with np.errstate(all="ignore"):
            for w, g, state, (x,) in blocks(parameters, gradient, slots, scratch=1):
                if l2:
                    np.multiply(w, l2, out=x)
                    x += g
                self.rule.update(w, x if l2 else g, state, step)
                if share is not None:
                    approach(state[AVERAGE], w, share, scratch=x)

    def _share(self, updates: int) -> np.float32 | None:
        """Return 1 - d of the average after this many updates."""
        if self.moving_average is None:
            return None
        return np.float32(1 - min(self.moving_average, (1 + updates) / (10 + updates)))


def new_slots(rule: Rule, parameters: Flat) -> dict[str, Flat]:
    """Allocate a rule's slots for these parameters (shape (n,)), with their initial values."""
    return {
        slot.name: parameters.copy()
        if slot.initial is None
        else np.full_like(parameters, slot.initial)
        for slot in rule.slots
    }
