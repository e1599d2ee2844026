"""The loop over memory that LLVM compiles for a formula: one pass, without the GIL.

Arithmetic is IEEE float32 in the order of the formula, as in NumPy: without fast-math flags, LLVM
neither reorders operations nor fuses a product and a sum. To be fast the loop must vectorise, so it
has no branch in it, and no two arrays overlap.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from llvmlite import ir

from zmqtrain.optim.kernels.llvm import FLOAT, FLOATS, INT, INTS, Builder, begun, const
from zmqtrain.optim.kernels.llvm import compiled as compiled_functions
from zmqtrain.optim.kernels.trace import Operand, Trace
from zmqtrain.optim.redo import DONE, KERNEL_BLOCK, READY

_BINARY = {np.add: "fadd", np.subtract: "fsub", np.multiply: "fmul", np.divide: "fdiv"}
_ORDERS = {np.maximum: ">=", np.minimum: "<="}
_INTRINSICS = {np.sqrt: "llvm.sqrt", np.abs: "llvm.fabs"}

Values: TypeAlias = dict[str, ir.Value]


def compiled(trace: Trace, *, guarded: bool) -> Any:
    """Compile the loop of an update, ``guarded`` if it is to be crash-safe; takes some 40 ms.

    ``loop(start, stop, gradient, *arrays, *copies, progress, *numbers)`` updates the elements from
    ``start`` to ``stop``, of which ``gradient`` holds those of the gradient. A crash-safe loop has
    ``copies``, one for each array, to which new values go before they go to the arrays, and
    ``progress``: see redo.py; others have neither.

    Raises:
        NotImplementedError: the formula uses what has no counterpart here.
    """
    copies = [f"{name}_copy" for name in trace.arrays] if guarded else []
    types = {"start": INT, "stop": INT, "g": FLOATS}
    types |= dict.fromkeys((*trace.arrays, *copies), FLOATS)
    types |= {"progress": INTS} if guarded else {}
    types |= dict.fromkeys(trace.numbers, FLOAT)
    function, build = begun("update", list(types.values()), disjoint=True)
    given = dict(zip(types, function.args, strict=True))
    start, stop = given["start"], given["stop"]
    given["g"] = build.gep(given["g"], [build.neg(start)])  # from here on element i belongs to i
    if not guarded:
        with build.counted(start, stop) as i:
            _element(build, trace, given, i, [given[name] for name in trace.arrays])
    else:
        with build.counted(start, stop, KERNEL_BLOCK) as begin:
            end = build.lesser(build.add(begin, const(KERNEL_BLOCK)), stop)
            new = [build.gep(given[copy], [build.neg(begin)]) for copy in copies]
            with build.counted(begin, end) as i:
                _element(build, trace, given, i, new)
            build.note(given["progress"], READY, end)
            with build.counted(begin, end) as i:
                for name, copy in zip(trace.arrays, new, strict=True):
                    build.store_at(given[name], i, build.load_at(copy, i))
            build.note(given["progress"], DONE, end)
    build.ret_void()
    (loop,) = compiled_functions(function)
    return loop


def _element(build: Builder, trace: Trace, given: Values, i: ir.Value, new: list[ir.Value]) -> None:
    """Build the update of element ``i``, whose new values go to the arrays ``new``."""
    values = {name: given[name] for name in trace.numbers}
    for name in ("g", *trace.arrays):
        values[name] = build.load_at(given[name], i)
    for operation in trace.operations:
        operands = [_value(values, operand) for operand in operation.operands]
        values[operation.name] = _operation(build, operation.ufunc, *operands)
    for result, array in zip(trace.results, new, strict=True):
        build.store_at(array, i, values[result])


def _value(values: Values, operand: Operand) -> ir.Value:
    return values[operand] if isinstance(operand, str) else _constant(operand)


def _constant(number: float) -> ir.Constant:
    return ir.Constant(FLOAT, number)


def _operation(build: Builder, ufunc: np.ufunc, x: ir.Value, *others: ir.Value) -> ir.Value:
    """Build one operation, which gives NumPy's bits."""
    if ufunc in _BINARY:
        return getattr(build, _BINARY[ufunc])(x, *others)
    if ufunc in _INTRINSICS:
        return build.call(build.module.declare_intrinsic(_INTRINSICS[ufunc], [FLOAT]), [x])
    if ufunc is np.negative:
        return build.fneg(x)
    if ufunc in _ORDERS:  # NaN of either stays
        (y,) = others
        is_first = build.fcmp_ordered(_ORDERS[ufunc], x, y)
        is_first = build.or_(is_first, build.fcmp_unordered("uno", x, x))
        return build.select(is_first, x, y)
    if ufunc is np.sign:  # NaN stays
        zero = _constant(0)
        found = build.select(build.fcmp_ordered("==", x, zero), zero, x)
        found = build.select(build.fcmp_ordered("<", x, zero), _constant(-1), found)
        return build.select(build.fcmp_ordered(">", x, zero), _constant(1), found)
    raise NotImplementedError(f"no kernel for numpy.{ufunc.__name__} in a formula")
