"""What the kernels of a kind of processor are to those who use them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from zmqtrain.compute.arrays import Flat

Numbers: TypeAlias = tuple[np.float32 | bool, ...]
"""Hyper-parameters of a rule, and behind them its switches."""

Kernel: TypeAlias = Callable[[Flat, int, np.float32, Numbers], None]
"""Called with a gradient, the element where its run begins, the average's share, and numbers."""


@dataclass(frozen=True, slots=True)
class Operands:
    """What a kernel changes, and with how much L2.

    ``arrays``: parameters, slots and average, of shape (n,), None for what an update has not.
    ``areas`` and ``progress`` are those of a guarded update (redo.py), else None.
    """

    arrays: Sequence[Flat | None]
    l2: np.float32
    areas: Sequence[Flat | None] | None = None
    progress: NDArray[np.int64] | None = None

    @property
    def present(self) -> tuple[bool, ...]:
        return tuple(array is not None for array in self.arrays)


class Backend(Hashable, Protocol):
    """The kernels of one kind of processor."""

    def load(self, name: str, present: tuple[bool, ...], guarded: bool) -> Any:
        """Return a kernel's code, for the arrays that are ``present``.

        Raises:
            Exception: it cannot be compiled, for whatever reason a compiler has.
        """
        ...

    def bind(self, code: Any, operands: Operands) -> Kernel:
        """Return a kernel, ready to run; it keeps its operands.

        Raises:
            TypeError: it cannot write to them.
        """
        ...

    def scaled_sum(self, out: Flat, a: Flat, b: Flat, scale: np.float32) -> None:
        """out = (a + b) * scale. ``out`` is neither ``a`` nor ``b``."""
        ...
