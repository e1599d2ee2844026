"""The sum of a gradient's squares, compiled by LLVM into one pass over memory, without the GIL.

Each square is a float64, exactly: a float32 has 24 bits. It is rounded to a whole number of units
and added to integers. No rounding depends on another element, so the sum is the same in whatever
order and however cut the elements come.

A float64 sum with 2^52 low units has the number of these units in its last bits. So a square of
less than 2^92 units is split in two: into high units (2^40 units each), and units for the rest.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from zmqtrain.compute.arrays import Flat
from zmqtrain.optim.kernels.cpu import address_of
from zmqtrain.optim.kernels.llvm import DOUBLE, FLOATS, INT, INTS, begun, compiled, const

BLOCK = 4096
"""Elements whose high units fit into 64 bits: each has less than 2^52."""

HIGH_BITS = 40


def sums_of_blocks(gradient: Flat, unit: float) -> tuple[int, list[slice]]:
    """Return the sum of squares in units, and the blocks that it leaves out.

    ``gradient``: contiguous, of shape (n,). ``unit``: a power of 2. In a block that is left out, an
    element is not finite or its square has 2^92 units or more.
    """
    rows = np.empty((-(-len(gradient) // BLOCK), 3), np.uint64)
    high, low = 2.0 ** (52 + HIGH_BITS) * unit, 1.5 * 2.0**52 * unit
    _compiled()(len(gradient), address_of(gradient), high, low, address_of(rows))
    large = np.flatnonzero(rows[:, 2] >= np.float64(2 * high).view(np.uint64))
    rows[large] = 0
    total = (sum(rows[:, 0].tolist()) << HIGH_BITS) + sum(rows[:, 1].view(np.int64).tolist())
    return total, [slice(at * BLOCK, (at + 1) * BLOCK) for at in large.tolist()]


@cache
def _compiled() -> Any:
    """Return ``squares(size, gradient, high, low, rows)``, which writes, for each block, high
    units, units and all bits of the sums."""
    types = INT, FLOATS, DOUBLE, DOUBLE, INTS
    function, build = begun("squares", types, disjoint=True)
    size, gradient, high, low, rows = function.args
    zero = const(0)
    upper, lower, seen = totals = [build.alloca(INT) for _ in range(3)]
    high_bits, low_bits = build.bitcast(high, INT), build.bitcast(low, INT)
    with build.counted(zero, size, BLOCK) as begin:
        end = build.lesser(build.add(begin, const(BLOCK)), size)
        for total in totals:
            build.store(zero, total)
        with build.counted(begin, end) as i:
            wide = build.fpext(build.load_at(gradient, i), DOUBLE)
            square = build.fmul(wide, wide)
            sum_with_high = build.fadd(square, high)
            rest = build.fsub(square, build.fsub(sum_with_high, high))
            bits = build.bitcast(sum_with_high, INT)
            units = build.sub(build.bitcast(build.fadd(rest, low), INT), low_bits)
            build.raised(upper, build.sub(bits, high_bits))
            build.raised(lower, units)
            build.store(build.or_(build.load(seen), bits), seen)
        row = build.mul(build.udiv(begin, const(BLOCK)), const(3))
        for place, total in enumerate(totals):
            build.store_at(rows, build.add(row, const(place)), build.load(total))
    build.ret_void()
    (code,) = compiled(function)
    return code
