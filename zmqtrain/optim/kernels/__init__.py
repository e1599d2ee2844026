"""Kernels of updates: in NumPy, compiled by LLVM for the CPU, or on a GPU.

All three run the formula of the rule (formula.py) and give the same bits. A rule with its own
``update`` method runs unchanged; on a GPU by CuPy's kernels, which treat subnormal numbers as 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from zmqtrain.models.backend import is_on_gpu
from zmqtrain.optim.base import Rule
from zmqtrain.optim.formula import FormulaRule, MatrixRule, Numbers
from zmqtrain.optim.kernels.base import Call, Kernel, Operands, Scalars, warn
from zmqtrain.optim.kernels.reference import FormulaKernel, RuleKernel
from zmqtrain.optim.row_rules import OfRows

__all__ = ["Call", "Kernel", "Operands", "Scalars", "bind", "call_of", "numbers_of"]


def bind(operands: Operands, *, compiled: bool) -> Kernel:
    """Return the kernel for this memory: compiled if wanted and possible, else in NumPy.

    On a GPU every formula is compiled, since CuPy's own kernels treat subnormal numbers as 0.
    """
    rule = operands.rule
    if not has_formula(rule):
        kernel = _compiled(operands) if compiled and isinstance(rule, OfRows) else None
        return kernel or RuleKernel(operands)
    if is_on_gpu(operands.parameters):
        from zmqtrain.optim.kernels.gpu import GpuKernel

        return GpuKernel(operands)
    return (_compiled(operands) if compiled and rule.is_exact else None) or FormulaKernel(operands)


def call_of(kernel: Kernel, scalars: Scalars) -> Call | None:
    """Return what a kernel calls to update memory; None: it is not one call of compiled code."""
    call = getattr(kernel, "call", None)
    return None if call is None else call(scalars)


def has_formula(rule: Any) -> bool:
    """Return whether the rule is its formula; a subclass may have its own ``update``."""
    own = FormulaRule.update, MatrixRule.update
    return isinstance(rule, FormulaRule) and type(rule).update in own


def numbers_of(rule: Rule) -> Callable[[int], Numbers]:
    """Return a function that returns a rule's hyperparameters at a step; () without a formula.

    It raises what the rule raises at this step.
    """
    if isinstance(rule, FormulaRule) and has_formula(rule):
        return rule.hyperparameters
    nothing = np.empty(0, np.float32)
    slots = {slot.name: nothing for slot in rule.slots}

    def check(step: int) -> Numbers:  # a rule raises its errors for an empty block, too
        rule.update(nothing, nothing, slots, step)
        return ()

    return check


def _compiled(operands: Operands) -> Kernel | None:
    try:
        from zmqtrain.optim.kernels import by_row, cpu
    except Exception as error:  # a broken LLVM may raise anything
        warn(repr(error))
        return None
    return by_row.RowKernel(operands) if isinstance(operands.rule, OfRows) else cpu.bind(operands)
