"""The sum of a gradient's squares, compiled by LLVM into one pass over memory, without the GIL.

Each square is a float64, exactly: a float32 has 24 bits. It is rounded to a whole number of units
and added to integers. No rounding depends on another element, so the sum is the same in whatever
order and however cut the elements come.

A float64 sum with 2^52 low units has the number of these units in its last bits. So a square of
less than 2^92 units is split in two: into high units (2^40 units each), and units for the rest.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir

from zmqtrain.compute.arrays import Flat
from zmqtrain.optim.kernels.cpu import address_of
from zmqtrain.optim.kernels.loop import counted, engine_of

BLOCK = 4096
"""Elements whose high units fit into 64 bits: each has less than 2^52."""

HIGH_BITS = 40

_INT, _FLOAT, _DOUBLE = ir.IntType(64), ir.FloatType(), ir.DoubleType()


def sums_of_blocks(gradient: Flat, unit: float) -> tuple[int, list[slice]]:
    """Return the sum of squares in units, and the blocks that it leaves out.

    ``gradient``: contiguous, of shape (n,). ``unit``: a power of 2. In a block that is left out, an
    element is not finite or its square has 2^92 units or more.
    """
    rows = np.empty((-(-len(gradient) // BLOCK), 3), np.uint64)
    high, low = 2.0 ** (52 + HIGH_BITS) * unit, 1.5 * 2.0**52 * unit
    code, _ = _compiled()
    code(len(gradient), address_of(gradient), high, low, address_of(rows))
    large = np.flatnonzero(rows[:, 2] >= np.float64(2 * high).view(np.uint64))
    rows[large] = 0
    total = (sum(rows[:, 0].tolist()) << HIGH_BITS) + sum(rows[:, 1].view(np.int64).tolist())
    return total, [slice(at * BLOCK, (at + 1) * BLOCK) for at in large.tolist()]


@cache
def _compiled() -> tuple[Callable[..., None], Any]:
    """Return the code, and its owner."""
    function = _function()
    _, engine = engine_of(function.module)
    types = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double, ctypes.c_double, ctypes.c_void_p
    address = engine.get_function_address(function.name)
    return ctypes.CFUNCTYPE(None, *types)(address), engine


def _function() -> ir.Function:
    """Return a function that writes, for each block, high units, units and all bits of the sums."""
    types = _INT, _FLOAT.as_pointer(), _DOUBLE, _DOUBLE, _INT.as_pointer()
    function = ir.Function(ir.Module(), ir.FunctionType(ir.VoidType(), types), "squares")
    size, gradient, high, low, rows = function.args
    gradient.add_attribute("noalias")
    rows.add_attribute("noalias")
    build = ir.IRBuilder(function.append_basic_block())
    zero = ir.Constant(_INT, 0)
    upper, lower, seen = totals = [build.alloca(_INT) for _ in range(3)]
    high_bits, low_bits = build.bitcast(high, _INT), build.bitcast(low, _INT)
    with counted(build, zero, size, BLOCK) as begin:
        end = build.add(begin, ir.Constant(_INT, BLOCK))
        end = build.select(build.icmp_signed("<", end, size), end, size)
        for total in totals:
            build.store(zero, total)
        with counted(build, begin, end, 1) as i:
            wide = build.fpext(build.load(build.gep(gradient, [i])), _DOUBLE)
            square = build.fmul(wide, wide)
            sum_with_high = build.fadd(square, high)
            rest = build.fsub(square, build.fsub(sum_with_high, high))
            bits = build.bitcast(sum_with_high, _INT)
            units = build.sub(build.bitcast(build.fadd(rest, low), _INT), low_bits)
            build.store(build.add(build.load(upper), build.sub(bits, high_bits)), upper)
            build.store(build.add(build.load(lower), units), lower)
            build.store(build.or_(build.load(seen), bits), seen)
        row = build.mul(build.udiv(begin, ir.Constant(_INT, BLOCK)), ir.Constant(_INT, 3))
        for place, total in enumerate(totals):
            at = build.add(row, ir.Constant(_INT, place))
            build.store(build.load(total), build.gep(rows, [at]))
    build.ret_void()
    return function
