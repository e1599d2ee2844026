"""Updates on a GPU: one elementwise kernel of CuPy, whose source is traced from the formula.

A GPU does the operations of the formula in the same order, without fused multiply-add. It gives
NumPy's bits, except for powers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import cupy

from zmqtrain.compute.arrays import Flat
from zmqtrain.optim.formula import at
from zmqtrain.optim.kernels.base import Operands, Scalars
from zmqtrain.optim.kernels.trace import Trace, lines_of, trace


class GpuKernel:
    """A formula, compiled for the GPU that its arrays lie on; queued on the current stream."""

    def __init__(self, operands: Operands) -> None:
        self._operands = operands
        self._arrays = operands.arrays
        self._code: Callable[..., None] | None = None

    def __call__(self, gradient: Flat, start: int, scalars: Scalars) -> None:
        rule, l2 = self._operands.rule, self._operands.l2
        numbers = scalars.numbers
        if self._code is None:
            are_there = [array is not None for array in self._arrays]
            switches = [number if isinstance(number, bool) else None for number in numbers]
            options = {"factor": scalars.factor is not None, "l2": l2 is not None}
            self._code = _compiled(trace(rule.formula, are_there, switches, **options))
        arrays = at(self._arrays, slice(start, start + len(gradient)))
        read = [number for number in numbers if not isinstance(number, bool)]
        read += scalars.others(l2)
        there = [array for array in arrays if array is not None]
        self._code(gradient, *read, *there)


@cache
def _compiled(noted: Trace) -> Callable[..., None]:
    """Return a kernel; CuPy compiles it at its first call and caches the code."""
    kernel: Callable[..., None] = cupy.ElementwiseKernel(
        ", ".join(f"float32 {name}" for name in ("g", *noted.numbers)),
        ", ".join(f"float32 {name}" for name in noted.arrays),
        "\n".join(lines_of(noted)),
        "zmqtrain_update",
        options=("--fmad=false",),
    )
    return kernel
