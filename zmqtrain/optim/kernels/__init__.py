"""Kernels of updates: in NumPy, compiled by LLVM for the CPU, or on a GPU.

All three run the formula of the rule (formula.py) and give the same bits. A rule with its own
``update`` method runs unchanged.
"""

from __future__ import annotations

from typing import Any

from zmqtrain.models.backend import is_on_gpu
from zmqtrain.optim.formula import FormulaRule
from zmqtrain.optim.kernels.base import Kernel, Memory, Terms, warn
from zmqtrain.optim.kernels.reference import FormulaKernel, RuleKernel

__all__ = ["Kernel", "Memory", "Terms", "bind"]


def bind(memory: Memory, *, compiled: bool) -> Kernel:
    """Return the kernel for this memory: compiled if wanted and possible, else in NumPy."""
    if not has_formula(memory.rule):
        return RuleKernel(memory)
    return (_compiled(memory) if compiled else None) or FormulaKernel(memory)


def has_formula(rule: Any) -> bool:
    """Return whether the rule is its formula; a subclass may have its own ``update``."""
    return isinstance(rule, FormulaRule) and type(rule).update is FormulaRule.update


def _compiled(memory: Memory) -> Kernel | None:
    if is_on_gpu(memory.parameters):
        from zmqtrain.optim.kernels.gpu import GpuKernel

        return GpuKernel(memory)
    if not memory.rule.is_exact:
        return None
    try:
        from zmqtrain.optim.kernels import cpu
    except Exception as error:  # a broken LLVM may raise anything
        warn(repr(error))
        return None
    return cpu.bind(memory)
