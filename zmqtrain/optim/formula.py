"""Rules that are one formula for every element, and how NumPy runs it: the reference.

The formula is traced as well (kernels/): what it does to one element becomes a loop that LLVM
compiles for the CPU, or a GPU's kernel. Both have NumPy's bits: the same operations in one order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np

from zmqtrain.compute.arrays import Flat, block_size, blocks
from zmqtrain.optim.base import Slot
from zmqtrain.optim.checks import Checked
from zmqtrain.optim.clipping import sum_of_squares

Numbers: TypeAlias = tuple[np.float32 | bool, ...]
"""Hyperparameters of one update, followed by switches, which are the same for every update."""

Formula: TypeAlias = Callable[..., tuple[Any, ...]]

_ONE = np.float32(1)


class FormulaRule(Checked, ABC):
    """A rule that is one formula for every element.

    ``formula(w, g, *slots, *numbers)`` takes a parameter, its gradient, the slots of
    ``formula_slots`` and the numbers of ``hyperparameters(step)``; it returns the new parameter and
    the new slots, in a tuple. NumPy calls it with arrays, and a tracer with symbols. It may use
    operators, NumPy's sqrt, sign, abs, maximum, minimum and power, and ``approach``. It may branch
    on switches and on slots that are None, never on values. Its constants are np.float32.
    """

    __slots__ = ()

    formula: ClassVar[Formula]
    zero_slots: ClassVar[tuple[str, ...]] = ()
    """Names of the slots, if all of them are 0 at first."""

    @property
    def slots(self) -> tuple[Slot, ...]:
        return tuple(Slot(name, 0.0) for name in self.zero_slots)

    @abstractmethod
    def hyperparameters(self, step: int) -> Numbers:
        """Return the numbers of the update that follows ``step`` others.

        Raises:
            ConfigError: the rule cannot use the learning rate of this step.
        """

    @property
    def formula_slots(self) -> tuple[str | None, ...]:
        """Names of the slots that the formula takes; None for one that this rule does not have."""
        return tuple(slot.name for slot in self.slots)

    @property
    def is_exact(self) -> bool:
        """Whether compiled code gives NumPy's bits; if not, NumPy runs the formula on a CPU."""
        return True

    def update(
        self, parameters: Flat, gradient: Flat, slots: Mapping[str, Flat], step: int
    ) -> None:
        numbers, arrays = self.hyperparameters(step), self.arrays(parameters, slots)
        factor = self._factor(arrays, gradient, step)
        for block in blocks(len(gradient), block_size(gradient)):
            w, *own = here = at(arrays, block)
            g = gradient[block]
            new = element(self.formula, w, g, tuple(own), None, numbers, Common(factor))
            put((*here, None), new)

    def _factor(
        self, arrays: tuple[Flat | None, ...], gradient: Flat, step: int
    ) -> np.float32 | None:
        """Return the factor of a LayerRule for a variable."""
        return None

    def arrays(self, parameters: Flat, slots: Mapping[str, Flat]) -> tuple[Flat | None, ...]:
        """Return the parameters and the formula's slots, None for a missing slot."""
        return (parameters, *(None if name is None else slots[name] for name in self.formula_slots))


class Common(NamedTuple):
    """Numbers of an update that every rule may have, or None: the factor of a LayerRule, the scale
    that turns a sum of gradients into a mean, L2, and the share of the moving average."""

    factor: Any = None
    scale: Any = np.float32(1)
    l2: Any = None
    share: Any = None


class LayerRule(FormulaRule):
    """A rule whose step length depends on norms of the whole variable.

    Its formula returns a direction; the new parameter is w - factor * direction. ``update`` is for
    one whole variable, which stays on one ps.
    """

    __slots__ = ()

    @abstractmethod
    def factor(self, squares: tuple[float, float], size: int, step: int) -> np.float32:
        """Return the factor of a variable.

        ``squares``: sums of squares of its ``size`` elements before the update, and of directions.
        """

    def _factor(self, arrays: tuple[Flat | None, ...], gradient: Flat, step: int) -> np.float32:
        squares = squares_of(self, arrays, gradient, step, _ONE, None)
        return self.factor(squares, len(gradient), step)


class MatrixRule(LayerRule):
    """A LayerRule that computes the direction of a whole variable in its shape, such as Muon.

    The last of its ``hyperparameters`` is a decay. With d the direction, a variable that the rule
    :meth:`sees` becomes w - decay * w - factor * d; its formula returns the new slots. Of other
    variables the formula returns the direction, too.
    """

    __slots__ = ()

    @abstractmethod
    def sees(self, shape: Sequence[int]) -> bool:
        """Return whether the rule needs a variable of this shape as a whole."""

    @abstractmethod
    def direction(self, gradient: Any, slots: Sequence[Any], numbers: Numbers, exact: bool) -> Any:
        """Return the direction of a variable that the rule sees.

        Arrays have the variable's shape. ``slots``: the new ones. ``numbers``: hyperparameters.
        ``exact``: every processor has to give the same bits.
        """

    def check(self, name: str, shape: Sequence[int], l2: float) -> None:
        """
        Raises:
            ConfigError: the rule cannot train a variable of this name, shape and ``l2``.
        """

    def moved(self, w: Any, direction: Any, factor: np.float32, numbers: Numbers) -> Any:
        """Return the new parameters."""
        return w - numbers[-1] * w - factor * direction

    def update(
        self, parameters: Flat, gradient: Flat, slots: Mapping[str, Flat], step: int
    ) -> None:
        """Apply one update in place, to arrays of the variable's shape."""
        if not self.sees(parameters.shape):
            super().update(parameters, gradient, slots, step)
            return
        (w, *old), numbers = self.arrays(parameters, slots), self.hyperparameters(step)
        _, *new = self.formula(w, gradient, *old, *numbers)
        direction = self.direction(gradient, new, numbers, False)
        squares = float(sum_of_squares(w)), float(sum_of_squares(direction))
        factor = self.factor(squares, gradient.size, step)
        put((w, *old), (self.moved(w, direction, factor, numbers), *new))


def squares_of(
    rule: LayerRule,
    arrays: tuple[Flat | None, ...],
    gradient: Flat,
    step: int,
    scale: np.float32,
    l2: np.float32 | None,
) -> tuple[float, float]:
    """Return the sums of squares of the parameters and of the direction, over ``gradient``.

    ``arrays``: parameters and the formula's slots, of its shape (n,). They are only read.
    """
    numbers = rule.hyperparameters(step)
    of_parameters = of_direction = 0.0
    for block in blocks(len(gradient), block_size(gradient)):
        w, *slots = at(arrays, block)
        g = gradient[block]
        with np.errstate(all="ignore"):
            common = Common(scale=scale, l2=l2)
            found = element(rule.formula, w, g, tuple(slots), None, numbers, common)
        of_parameters += float(sum_of_squares(w))
        of_direction += float(sum_of_squares(found[0]))
    return of_parameters, of_direction


def element(
    formula: Formula,
    w: Any,
    g: Any,
    slots: tuple[Any, ...],
    average: Any,
    numbers: tuple[Any, ...],
    common: Common,
) -> tuple[Any, ...]:
    """Return the new values of w, the slots and the average, of one element or of arrays.

    The whole update: L2, the rule, the moving average. A missing slot or ``average`` is None.
    """
    factor, scale, l2, share = common
    g = g * scale
    if l2 is not None:
        g = g + l2 * w
    first, *others = formula(w, g, *slots, *numbers)
    if factor is not None:
        first = w - factor * first
    return first, *others, None if average is None else approach(average, first, share)


def approach(average: Any, target: Any, share: Any) -> Any:
    """Return the average after it has moved by a share of the way to the target."""
    return average + (target - average) * share


def total(terms: Sequence[Any], weights: Sequence[Any], factor: Any, limit: Any) -> Any:
    """Return the weighted sum of the terms in order, times factor, clipped to [-limit, limit]."""
    found, *others = (term * weight for term, weight in zip(terms, weights, strict=True))
    for term in others:
        found = found + term
    return np.minimum(np.maximum(found * factor, -limit), limit)


def rounded(*values: float) -> tuple[np.float32, ...]:
    """Return hyperparameters as a formula takes them."""
    return tuple(map(np.float32, values))


def at(arrays: tuple[Flat | None, ...], block: slice) -> tuple[Flat | None, ...]:
    """Return this block of all arrays; None stays None."""
    return tuple(None if array is None else array[block] for array in arrays)


def put(arrays: tuple[Flat | None, ...], values: tuple[Any, ...]) -> None:
    """Set all arrays that are not None."""
    for array, value in zip(arrays, values, strict=True):
        if array is not None:
            array[...] = value
