"""The global norm of a mean, and the factor that limits it.

Shards, their parts and threads each see some elements. So squares are added in a form that has the
same sum in every order: each, which a float64 holds exactly, is rounded to a whole number of
*units*, and units are added as integers. A unit is so small beside the square of the limit that the
roundings of 2^36 elements make less than 2^-22 of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import frexp, sqrt
from typing import Any

import numpy as np

from zmqtrain.compute.arrays import Flat, blocks
from zmqtrain.optim.clipping import sum_of_squares

_LARGEST_SQUARE = 2.0**256  # of a float32
_LIMB_BITS = 40  # the sum of 2^23 numbers of 40 bits fits into an int64


def clip_scale(square: float, limit: float) -> float:
    """Return the factor limit / max(limit, norm) of a mean: that of tf.clip_by_global_norm.

    ``square``: that of the norm, in units for this limit. The factor is that of Keras's
    global_clipnorm and optax.clip_by_global_norm; torch's clip_grad_norm_ divides by norm + 1e-6.
    """
    return limit / max(limit, sqrt(square) * sqrt(_unit(limit)))


def square_of(gradient: Any, limit: float) -> int:
    """Return the sum of squares of a gradient of shape (n,), in units for a limit of its norm.

    It does not depend on the order of the elements, and is the sum of those of its parts. An
    infinite element counts as the largest finite one. On a GPU the sum is one of float64, rounded,
    in which subnormal elements count as 0.
    """
    unit = _unit(limit)
    if not isinstance(gradient, np.ndarray):
        return round(min(_LARGEST_SQUARE, float(sum_of_squares(gradient))) / unit)
    total, rest = 0, list(blocks(len(gradient)))
    flags = gradient.flags
    if flags.c_contiguous and flags.aligned and (compiled := _compiled()) is not None:
        total, rest = compiled(gradient, unit)
    return total + sum(_square_of(gradient[block], unit) for block in rest)


def _unit(limit: float) -> float:
    """Return 2^-60 of a power of 4 that is at least the square of the limit.

    Float32 numbers lie between 2^-149 and 2^128, and so do the limits that differ for them.
    """
    exponent = min(max(frexp(limit)[1], -149), 129)
    return 2.0 ** (2 * exponent - 60)


def _square_of(block: Flat, unit: float) -> int:
    """Do :func:`square_of` in NumPy: the numbers of units, 40 bits after 40."""
    wide = np.nan_to_num(block).astype(np.float64)
    units = np.rint(wide * wide / unit)
    total = shift = 0
    while units.any():
        units, limb = np.divmod(units, 2.0**_LIMB_BITS)
        total += int(limb.astype(np.int64).sum()) << shift
        shift += _LIMB_BITS
    return total


@cache
def _compiled() -> Callable[[Flat, float], tuple[int, list[slice]]] | None:
    try:
        from zmqtrain.optim.kernels.squares import sums_of_blocks

        sums_of_blocks(np.zeros(1, np.float32), 1.0)
    except Exception:  # a broken LLVM may raise anything; the kernels warn about it
        return None
    return sums_of_blocks
