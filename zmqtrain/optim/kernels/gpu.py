"""Kernels on a GPU: NVRTC compiles them (source.py); they are queued on the current stream."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import inf
from typing import Any

import numpy as np

from zmqtrain.compute.arrays import Flat
from zmqtrain.optim.kernels.base import Kernel, Operands, Scalars, warn
from zmqtrain.optim.kernels.reference import FormulaKernel
from zmqtrain.optim.kernels.source import NAME, OPTIONS, source_for, source_for_sum

THREADS = 256
"""Threads in a block."""

MOST_BLOCKS = 1 << 16
"""With more elements than threads in this number of blocks, a thread updates several elements."""

MOST_TERMS = 64
"""Gradients that one kernel adds up at most; CUDA limits a kernel's parameters to 4 KiB."""


class GpuKernel:
    """A formula, compiled at the first update, whose numbers show which of them are switches."""

    def __init__(self, operands: Operands) -> None:
        self._operands = operands
        self._update: Kernel | None = None

    def __call__(self, gradient: Flat, start: int, scalars: Scalars) -> None:
        if self._update is None:
            self._update = _fused(self._operands, scalars) or FormulaKernel(self._operands)
        self._update(gradient, start, scalars)


def _fused(operands: Operands, scalars: Scalars) -> Kernel | None:
    """Return the compiled update; None, with a warning, if the formula has no kernel."""
    try:
        source = source_for(operands, scalars)
    except Exception as error:  # a formula may raise anything
        warn(f"{type(error).__name__}: {error}")
        return None
    arrays, l2 = [array for array in operands.arrays if array is not None], operands.l2

    def update(gradient: Flat, start: int, scalars: Scalars) -> None:
        numbers = [number for number in scalars.numbers if not isinstance(number, bool)]
        where = slice(start, start + len(gradient))
        _run(source, [gradient], numbers + scalars.others(l2), [array[where] for array in arrays])

    return update


def add_up(
    terms: Sequence[Flat], weights: Sequence[float], factor: float, limit: float, out: Flat
) -> None:
    """Set ``out`` to :func:`zmqtrain.optim.formula.total`; ``out`` may be the first term."""
    while len(terms) > MOST_TERMS:
        add_up(terms[:MOST_TERMS], weights[:MOST_TERMS], 1, inf, out)
        terms, weights = [out, *terms[MOST_TERMS:]], [1, *weights[MOST_TERMS:]]
    _run(source_for_sum(len(terms)), terms, [*weights, factor, limit], [out])


def _run(
    source: str,
    gradients: Sequence[Any],
    numbers: Sequence[float] | Sequence[np.float32],
    arrays: Sequence[Any],
) -> None:
    """Queue a kernel on the current stream of the device that the arrays lie on."""
    size, device = len(gradients[0]), arrays[0].device
    for array in (*gradients, *arrays):
        if len(array) != size:
            raise ValueError(f"arrays of {size} and {len(array)} elements; expected the same size")
    for array in arrays:
        if array.dtype != np.float32 or not array.flags.c_contiguous:
            raise TypeError(f"{array.dtype} {array.strides}; expected contiguous float32")
    if not size:
        return
    with device:
        read = [gradient.astype(np.float32, "C", copy=False) for gradient in gradients]
        blocks = min(-(-size // THREADS), MOST_BLOCKS)
        arguments = np.int64(size), *read, *map(np.float32, numbers), *arrays
        compiled(source, device.id)((blocks,), (THREADS,), arguments)


@cache
def compiled(source: str, device: int) -> Any:
    """Return the kernel, loaded on the current ``device``; compiling it takes some 100 ms.

    CuPy's own classes of kernels append -ftz=true, which NVRTC would apply instead of ours.
    """
    from cupy.cuda.compiler import compile_using_nvrtc
    from cupy.cuda.function import Module

    code, _ = compile_using_nvrtc(source, OPTIONS, cache_in_memory=True)
    module = Module()
    module.load(code)
    return module.get_function(NAME)
