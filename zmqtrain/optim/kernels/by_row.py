"""RowwiseAdagrad, compiled by LLVM: the bits of ``OfRows`` in optim/row_rules.py."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir

from zmqtrain.optim.kernels.base import Call, Operands, Scalars
from zmqtrain.optim.kernels.cpu import address_of
from zmqtrain.optim.kernels.loop import counted, engine_of
from zmqtrain.optim.kernels.reference import RuleKernel
from zmqtrain.optim.schedules import rate_at

_INT, _FLOAT = ir.IntType(64), ir.FloatType()


class RowKernel(RuleKernel):
    """A rule for rows, whose update of all memory is one call of compiled code."""

    def __init__(self, operands: Operands) -> None:
        super().__init__(operands)
        self._rule, self._l2 = operands.rule, operands.l2
        self._addresses = tuple(map(address_of, (operands.parameters, *operands.slots.values())))
        self._code, self._engine = _compiled(operands.rule.dim, operands.l2 is not None)

    def call(self, scalars: Scalars) -> Call | None:
        """Return what an update of all memory calls."""
        rule = self._rule.rule
        own = np.float32(rate_at(rule.learning_rate, scalars.step)), np.float32(rule.epsilon)
        return Call(self._code, self._addresses, (*own, *scalars.others(self._l2)))


@cache
def _compiled(dim: int, has_l2: bool) -> tuple[int, Any]:
    """Return the address of ``update(start, stop, gradient, rows, accumulator, rate, epsilon,
    scale, l2)``, and the owner of its code; without ``has_l2`` there is no l2."""
    floats = _FLOAT.as_pointer()
    types = [_INT, _INT, *[floats] * 3, *[_FLOAT] * (4 if has_l2 else 3)]
    function = ir.Function(ir.Module(), ir.FunctionType(ir.VoidType(), types), "update")
    start, stop, gradient, rows, accumulator, rate, epsilon, scale, *l2 = function.args
    for array in (gradient, rows, accumulator):
        array.add_attribute("noalias")
    build = ir.IRBuilder(function.append_basic_block())
    zero, width = ir.Constant(_INT, 0), ir.Constant(_INT, dim)
    root, total = build.module.declare_intrinsic("llvm.sqrt", [_FLOAT]), build.alloca(_FLOAT)

    def element(at: ir.Value) -> ir.Value:
        scaled = build.fmul(build.load(build.gep(gradient, [at])), scale)
        for factor in l2:
            scaled = build.fadd(scaled, build.fmul(factor, build.load(build.gep(rows, [at]))))
        return scaled

    with counted(build, build.sdiv(start, width), build.sdiv(stop, width), 1) as row:
        first = build.mul(row, width)
        build.store(ir.Constant(_FLOAT, 0), total)
        with counted(build, zero, width, 1) as j:
            own = element(build.add(first, j))
            build.store(build.fadd(build.load(total), build.fmul(own, own)), total)
        place = build.gep(accumulator, [row])
        mean = build.fdiv(build.load(total), ir.Constant(_FLOAT, dim))
        known = build.fadd(build.load(place), mean)
        build.store(known, place)
        factor = build.fdiv(rate, build.fadd(build.call(root, [known]), epsilon))
        with counted(build, zero, width, 1) as j:
            at = build.add(first, j)
            target = build.gep(rows, [at])
            build.store(build.fsub(build.load(target), build.fmul(element(at), factor)), target)
    build.ret_void()
    _, engine = engine_of(function.module)
    return engine.get_function_address("update"), engine
