"""RowwiseAdagrad, compiled by LLVM: the bits of ``OfRows`` in optim/row_rules.py."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir

from zmqtrain.optim.kernels.base import Call, Operands, Scalars
from zmqtrain.optim.kernels.cpu import address_of
from zmqtrain.optim.kernels.llvm import FLOAT, FLOATS, INT, begun, compiled, const
from zmqtrain.optim.kernels.reference import RuleKernel
from zmqtrain.optim.schedules import rate_at


class RowKernel(RuleKernel):
    """A rule for rows, whose update of all memory is one call of compiled code."""

    def __init__(self, operands: Operands) -> None:
        super().__init__(operands)
        self._rule, self._l2 = operands.rule, operands.l2
        self._addresses = tuple(map(address_of, (operands.parameters, *operands.slots.values())))
        self._code = _compiled(operands.rule.dim, operands.l2 is not None)

    def call(self, scalars: Scalars) -> Call | None:
        """Return what an update of all memory calls."""
        rule = self._rule.rule
        own = np.float32(rate_at(rule.learning_rate, scalars.step)), np.float32(rule.epsilon)
        return Call(self._code.address, self._addresses, (*own, *scalars.others(self._l2)))


@cache
def _compiled(dim: int, has_l2: bool) -> Any:
    """Return ``update(start, stop, gradient, rows, accumulator, rate, epsilon, scale, l2)``;
    without ``has_l2`` there is no l2."""
    types = [INT, INT, *[FLOATS] * 3, *[FLOAT] * (4 if has_l2 else 3)]
    function, build = begun("update", types, disjoint=True)
    start, stop, gradient, rows, accumulator, rate, epsilon, scale, *l2 = function.args
    zero, width = const(0), const(dim)
    root, total = build.module.declare_intrinsic("llvm.sqrt", [FLOAT]), build.alloca(FLOAT)

    def element(at: ir.Value) -> ir.Value:
        scaled = build.fmul(build.load_at(gradient, at), scale)
        for factor in l2:
            scaled = build.fadd(scaled, build.fmul(factor, build.load_at(rows, at)))
        return scaled

    with build.counted(build.sdiv(start, width), build.sdiv(stop, width)) as row:
        first = build.mul(row, width)
        build.store(ir.Constant(FLOAT, 0), total)
        with build.counted(zero, width) as j:
            own = element(build.add(first, j))
            build.store(build.fadd(build.load(total), build.fmul(own, own)), total)
        place = build.gep(accumulator, [row])
        mean = build.fdiv(build.load(total), ir.Constant(FLOAT, dim))
        known = build.fadd(build.load(place), mean)
        build.store(known, place)
        factor = build.fdiv(rate, build.fadd(build.call(root, [known]), epsilon))
        with build.counted(zero, width) as j:
            at = build.add(first, j)
            target = build.gep(rows, [at])
            build.store(build.fsub(build.load(target), build.fmul(element(at), factor)), target)
    build.ret_void()
    (code,) = compiled(function)
    return code
