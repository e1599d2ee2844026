"""The interface of the kernels."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np

from zmqtrain.compute.arrays import Flat
from zmqtrain.optim.formula import Numbers
from zmqtrain.optim.redo import Redo

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Operands:
    """The arrays that an update changes, and its constant arguments.

    ``parameters`` and ``slots`` have shape (n,). ``average`` names the slot of the moving average,
    ``l2`` is the regularisation; None: without. ``redo``: for all of these in a crash-safe update.
    """

    rule: Any  # Rule
    parameters: Flat
    slots: Mapping[str, Flat]
    average: str | None = None
    l2: np.float32 | None = None
    redo: Redo | None = None

    @property
    def arrays(self) -> tuple[Flat | None, ...]:
        """Parameters, the formula's slots, and the average; None for what is missing."""
        return self._chosen(self.parameters, self.slots)

    @property
    def copies(self) -> tuple[Flat | None, ...] | None:
        """The arrays for a block's new values; None without ``redo``."""
        if self.redo is None:
            return None
        first, *others = self.redo.copies
        return self._chosen(first, dict(zip(self.slots, others, strict=True)))

    def _chosen(self, parameters: Flat, slots: Mapping[str, Flat]) -> tuple[Flat | None, ...]:
        average = None if self.average is None else slots[self.average]
        return (*self.rule.arrays(parameters, slots), average)


@cache
def warn(why: str) -> None:
    """Log, once for each reason, why there are no compiled kernels."""
    log.warning("no compiled kernels, falling back to NumPy (several times slower): %s", why)


class Scalars(NamedTuple):
    """The numbers of one update.

    ``numbers``: the rule's hyperparameters at this step; none if it has no formula. The gradient is
    multiplied by ``scale``. ``share``: the average's share. ``factor``: that of a LayerRule.
    ``direction``: that of these elements, from a MatrixRule that sees their variable.
    """

    step: int
    numbers: Numbers
    scale: np.float32
    share: np.float32 | None
    factor: np.float32 | None
    direction: Flat | None = None

    def others(self, l2: np.float32 | None) -> list[np.float32]:
        """Return the other numbers and ``l2``, as far as there are, in the order of the code."""
        return [each for each in (self.factor, self.scale, l2, self.share) if each is not None]


class Call(NamedTuple):
    """A call of compiled code: ``code(start, stop, gradient, *arrays, *numbers)``, where the code,
    the gradient and the arrays are addresses."""

    code: int
    arrays: tuple[int, ...]
    numbers: tuple[Any, ...]


class Kernel(Protocol):
    """An update of the memory to which it is bound."""

    def __call__(self, gradient: Flat, start: int, scalars: Scalars) -> None:
        """Apply ``gradient`` to the elements from ``start`` on, one for each of its own.

        Raises:
            ConfigError: the rule cannot make this update; nothing was changed.
        """
