"""Updates on the CPU, compiled by LLVM into one pass over memory; they run without the GIL."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import Array, addressof, c_char
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zmqtrain.compute.arrays import Flat
from zmqtrain.errors import ConfigError
from zmqtrain.optim.formula import Formula, LayerRule
from zmqtrain.optim.kernels.base import Call, Operands, Scalars, warn
from zmqtrain.optim.kernels.loop import compiled
from zmqtrain.optim.kernels.trace import trace
from zmqtrain.optim.redo import KERNEL_BLOCK

_nothing_at: Callable[[Any], Array[c_char]] = (c_char * 0).from_buffer
"""``Any``: stubs of NumPy before 2.5 do not declare that an array is a buffer."""


def bind(operands: Operands) -> CpuKernel | None:
    """Return the compiled kernel for this memory; None, with a warning, if there cannot be one.

    Raises:
        TypeError: it could not write to the memory.
    """
    try:
        given = operands.rule.hyperparameters(0)
    except ConfigError:  # the update itself raises it again
        return None
    switches = tuple(number if isinstance(number, bool) else None for number in given)
    loop = _loaded(
        operands.rule.formula,
        tuple(array is not None for array in operands.arrays),
        switches,
        isinstance(operands.rule, LayerRule),
        operands.l2 is not None,
        operands.redo is not None,
    )
    return None if loop is None else CpuKernel(operands, loop, switches.count(None))


class CpuKernel:
    """A formula, compiled for the CPU."""

    def __init__(self, operands: Operands, loop: Any, numbers: int) -> None:
        """``numbers``: how many of the rule's hyperparameters are not switches."""
        self.loop = loop
        self._size = size = len(operands.parameters)
        self._numbers, self._l2 = numbers, operands.l2
        arrays = [array for array in operands.arrays if array is not None]
        copies = [copy for copy in operands.copies or () if copy is not None]
        for array in arrays:
            _check(array, size, or_longer=False)
        for copy in copies:
            _check(copy, min(size, KERNEL_BLOCK), or_longer=True)
        self._written: list[NDArray[Any]] = [*arrays, *copies]  # they must outlive their addresses
        self._is_guarded = operands.redo is not None
        if operands.redo is not None:
            _check_progress(operands.redo.progress)
            self._written.append(operands.redo.progress)
        self._addresses = [array.ctypes.data for array in self._written]

    def call(self, scalars: Scalars) -> Call | None:
        """Return what an update of all memory calls; None: a crash-safe one."""
        if self._is_guarded:
            return None
        return Call(self.loop.address, tuple(self._addresses), self._arguments(scalars))

    def __call__(self, gradient: Flat, start: int, scalars: Scalars) -> None:
        stop = start + len(gradient)
        if stop > self._size:
            raise ValueError(
                f"a gradient from {start} to {stop}; expected at most {self._size} elements"
            )
        given = _as_compiled(gradient)
        self.loop(start, stop, address_of(given), *self._addresses, *self._arguments(scalars))

    def _arguments(self, scalars: Scalars) -> tuple[Any, ...]:
        return *scalars.numbers[: self._numbers], *scalars.others(self._l2)


@cache
def _loaded(
    formula: Formula,
    are_there: tuple[bool, ...],
    switches: tuple[bool | None, ...],
    has_factor: bool,
    has_l2: bool,
    guarded: bool,
) -> Any:
    """Return the compiled loop of a formula for these arrays and numbers, None if that fails."""
    try:
        noted = trace(formula, are_there, switches, factor=has_factor, l2=has_l2)
        return compiled(noted, guarded=guarded)
    except Exception as error:  # a formula and a compiler may raise anything
        warn(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
        return None


def _as_compiled(gradient: Flat) -> Flat:
    """Return a contiguous, aligned float32 array; a received frame may be unaligned."""
    flags = gradient.flags
    if gradient.dtype == np.float32 and flags.c_contiguous and flags.aligned:
        return gradient
    return np.array(gradient, np.float32)


def address_of(array: NDArray[Any]) -> int:
    """Return where the elements lie; ``array.ctypes.data`` takes several times as long."""
    try:
        return addressof(_nothing_at(array))
    except (TypeError, ValueError):  # it is read-only, or empty
        return array.ctypes.data


def _check(array: Flat, size: int, *, or_longer: bool) -> None:
    is_long = len(array) >= size if or_longer else len(array) == size
    if not (is_long and array.dtype == np.float32 and array.flags.carray):
        raise TypeError(
            f"{len(array)} elements of {array.dtype} with strides {array.strides}; expected {size} "
            "of float32, contiguous, writable and aligned"
        )


def _check_progress(progress: NDArray[np.int64]) -> None:
    if progress.shape != (2,) or progress.dtype != np.int64 or not progress.flags.carray:
        raise TypeError(f"progress of {progress.shape} {progress.dtype}; expected 2 int64")
