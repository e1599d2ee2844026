"""How an update passes over memory: in NumPy, compiled by Numba for the CPU, or on a GPU.

All three run the formula of the rule (formula.py) and give the same bits. A rule of a third party,
which has an ``update`` of its own, runs as it is written.
"""

from __future__ import annotations

import sys
from typing import Any

from zmqtrain.compute.arrays import Flat
from zmqtrain.optim.formula import FormulaRule
from zmqtrain.optim.kernels.base import Kernel, Memory, warn
from zmqtrain.optim.kernels.reference import FormulaKernel, RuleKernel

__all__ = ["Kernel", "Memory", "bind"]


def bind(memory: Memory, *, compiled: bool) -> Kernel:
    """Return what updates this memory: compiled if that is wanted and can be, else in NumPy."""
    if not has_formula(memory.rule):
        return RuleKernel(memory)
    return (_compiled(memory) if compiled else None) or FormulaKernel(memory)


def has_formula(rule: Any) -> bool:
    """Say whether the rule is its formula; one derived from ours may have its own ``update``."""
    return isinstance(rule, FormulaRule) and type(rule).update is FormulaRule.update


def _compiled(memory: Memory) -> Kernel | None:
    if is_on_gpu(memory.parameters):
        from zmqtrain.optim.kernels.gpu import GpuKernel

        return GpuKernel(memory)
    if not memory.rule.is_exact:
        return None
    try:
        from zmqtrain.optim.kernels import cpu
    except Exception as error:  # whatever a broken Numba raises
        warn(repr(error))
        return None
    return cpu.bind(memory)


def is_on_gpu(array: Flat) -> bool:
    """Say so; never imports CuPy: where nobody has imported it, no array can be one of its own."""
    device_array = getattr(sys.modules.get("cupy"), "ndarray", None)
    return device_array is not None and isinstance(array, device_array)
