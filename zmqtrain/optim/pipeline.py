"""The whole update of a shard by one accepted gradient, in one pass over memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from zmqtrain.compute.arrays import Flat
from zmqtrain.errors import ConfigError
from zmqtrain.optim import kernels
from zmqtrain.optim.base import Rule, Slot
from zmqtrain.optim.blocks import block_size, blocks
from zmqtrain.optim.checks import check_decay, check_non_negative
from zmqtrain.optim.formula import LayerRule, at, squares_of
from zmqtrain.optim.redo import Redo

AVERAGE = "average"
"""The slot of the parameters' moving average."""

Pieces: TypeAlias = Sequence[tuple[slice, int]]
"""Which elements belong to which variable; one variable may have several pieces."""


@dataclass(frozen=True, slots=True)
class Update:
    """A rule with L2 regularisation before it and a moving average after it; itself a rule.

    With w the parameters, g the gradient, and a the slot "average", w's initial value at first:

        g = g + l2 * w                  the loss l2 * sum(w^2) / 2 of tf.contrib's l2_regularizer;
                                        Keras's regularizers.l2(l) is l2 = 2 * l
        the rule
        a += (1 - d) * (w - a)          with d = min(moving_average, (1 + k) / (10 + k))

    k is the number of updates including this one: tf.train.ExponentialMovingAverage with
    ``num_updates=global_step``, which TensorFlow's models run after the update. Without
    ``moving_average`` there is no such slot. Both act on every parameter, biases included.

    Non-finite values cause no warning here: gradients are checked when they arrive.

    A rule that is a formula is compiled to one pass over memory, with the same result.
    ``fused=False`` uses NumPy; it does not change the update, so it is not in its ``repr``.
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
        if isinstance(self.rule, Update) and self.rule.is_layered:
            raise ConfigError(
                f"Update: {self.rule.rule!r} needs whole variables and cannot be wrapped twice; "
                "give l2 and moving_average in one Update"
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

    @property
    def is_layered(self) -> bool:
        """Whether the update of an element depends on norms of its variable."""
        return isinstance(self.rule, LayerRule)

    def bind(
        self,
        parameters: Flat,
        slots: Mapping[str, Flat],
        redo: Redo | None = None,
        pieces: Pieces | None = None,
    ) -> BoundUpdate:
        """Bind this update to memory to which it is applied many times.

        ``redo``: for ``parameters`` and every slot, if the update must be crash-safe. ``pieces``:
        cover the memory, in order; None: all is one variable.
        """
        return BoundUpdate(self, parameters, slots, redo, pieces)

    def share(self, updates: int) -> np.float32 | None:
        """Return 1 - d of the average after this many updates."""
        if self.moving_average is None:
            return None
        return np.float32(1 - min(self.moving_average, (1 + updates) / (10 + updates)))


class BoundUpdate:
    """An update and the memory of one shard; lookups and allocations are made once."""

    def __init__(
        self,
        update: Update,
        parameters: Flat,
        slots: Mapping[str, Flat],
        redo: Redo | None = None,
        pieces: Pieces | None = None,
    ) -> None:
        average = None if update.moving_average is None else AVERAGE
        l2 = np.float32(update.l2) if update.l2 else None
        self._update = update
        self._memory = kernels.Memory(update.rule, parameters, slots, average, l2, redo)
        self._kernel = kernels.bind(self._memory, compiled=update.fused)
        self._pieces = [(slice(0, len(parameters)), 0)] if pieces is None else pieces
        self._scratch: Flat | None = None

    def apply_mean(
        self,
        gradients: Sequence[Flat],
        count: float,
        step: int,
        factors: Flat | None = None,
        weights: Sequence[float] | None = None,
    ) -> None:
        """Apply, as update ``step``, the sum of ``gradients`` in this order, divided by ``count``.

        ``gradients``: at least one, of shape (n,); only read. The sum is computed and used block by
        block, in one pass over memory. An interrupted crash-safe update goes on from its last
        block. ``factors``: of each variable, for a layered update; None: all is one variable.
        ``weights``: each gradient is multiplied by its own; None: all are 1.

        Raises:
            ConfigError: the rule cannot make this update; nothing was changed.
        """
        if self._update.is_layered and factors is None:
            size = len(self._memory.parameters)
            squares = self.squares(gradients, count, step, weights)
            factors = factors_of(self._update, squares, [size], step)
        share, scale = self._update.share(step + 1), np.float32(1 / count)
        start = 0 if self._memory.redo is None else self._memory.redo.done
        for block, gradient in self._sums(gradients, weights, start):
            for piece, factor in self._cut(block, factors):
                own = gradient[piece.start - block.start : piece.stop - block.start]
                self._kernel(own, piece.start, kernels.Terms(step, scale, share, factor))

    def squares(
        self,
        gradients: Sequence[Flat],
        count: float,
        step: int,
        weights: Sequence[float] | None = None,
    ) -> list[Squares]:
        """Return, for each piece, its variable and the sums of squares for its factor.

        The arguments are those of :meth:`apply_mean`, which comes after this.
        """
        arrays, l2 = self._memory.arrays[:-1], self._memory.l2
        found = []
        for piece, variable in self._pieces:
            here = at(arrays, piece)
            of_parameters = of_direction = 0.0
            own = [gradient[piece] for gradient in gradients]
            for block, gradient in self._sums(own, weights, 0):
                scale = np.float32(1 / count)
                w, d = squares_of(self._memory.rule, at(here, block), gradient, step, scale, l2)
                of_parameters, of_direction = of_parameters + w, of_direction + d
            found.append((variable, of_parameters, of_direction))
        return found

    def _sums(
        self, gradients: Sequence[Flat], weights: Sequence[float] | None, start: int
    ) -> Iterator[tuple[slice, Flat]]:
        """Yield the weighted sum of ``gradients`` from element ``start`` on, block by block.

        A single gradient is one block. An empty one is a block, too, since the rule may raise.
        """
        first, size = gradients[0], len(gradients[0])
        if (len(gradients) == 1 and weights is None) or not size:
            yield slice(start, size), first[start:] if start else first
            return
        length = min(len(self._memory.parameters), block_size(first))
        if self._scratch is None:
            self._scratch = np.empty_like(first, shape=length)
        with np.errstate(all="ignore"):
            for block in blocks(size, length, start):
                total = self._scratch[: block.stop - block.start]
                parts = [gradient[block] for gradient in gradients]
                if weights is not None:
                    parts = [p * np.float32(w) for p, w in zip(parts, weights, strict=True)]
                if len(parts) == 1:
                    total[...] = parts[0]
                else:
                    np.add(parts[0], parts[1], out=total)
                for part in parts[2:]:
                    total += part
                yield block, total

    def _cut(self, block: slice, factors: Flat | None) -> Iterator[tuple[slice, np.float32 | None]]:
        """Cut a block where another variable begins, if variables have factors."""
        if factors is None:
            yield block, None
            return
        for piece, variable in self._pieces:
            start, stop = max(piece.start, block.start), min(piece.stop, block.stop)
            if start < stop or block.start == block.stop:
                yield slice(start, stop), factors[variable]


Squares: TypeAlias = tuple[int, float, float]
"""A variable, and sums of squares of a piece of it: of the parameters and of the direction."""


def factors_of(update: Update, squares: Iterable[Squares], sizes: Sequence[int], step: int) -> Flat:
    """Return the factor of each variable; ``sizes``: their numbers of elements."""
    sums = [(0.0, 0.0)] * len(sizes)
    for variable, of_parameters, of_direction in squares:
        before = sums[variable]
        sums[variable] = before[0] + of_parameters, before[1] + of_direction
    rule = update.rule
    assert isinstance(rule, LayerRule)
    factors = [rule.factor(*given, step) for given in zip(sums, sizes, strict=True)]
    return np.array(factors, np.float32)


def new_slots(rule: Rule, parameters: Flat) -> dict[str, Flat]:
    """Allocate a rule's slots for these parameters (shape (n,)), with their initial values."""
    return {
        slot.name: parameters.copy()
        if slot.initial is None
        else np.full_like(parameters, slot.initial)
        for slot in rule.slots
    }
