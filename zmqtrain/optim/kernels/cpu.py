"""The fused kernels for the CPU: formulas in a loop, compiled by Numba when first asked for.

A kernel gives the numbers of the NumPy rule exactly, on every processor and however the memory is
cut into runs. Numba's ``fastmath`` would void that, for nothing: beyond the cache a loop is bound
by the memory. ``error_model="numpy"`` spares it the exceptions from divisions.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import numba
from numba import types

from zmqtrain.optim.kernels.loops import FORMULAS, loop_of, scaled_sum

log = logging.getLogger(__name__)

_tuple_of: Any = types.Tuple

_FLAT = types.float32[::1]
_GRADIENT = types.Array(types.float32, 1, "C", readonly=True, aligned=False)
"""A gradient may lie in a received frame, read-only and at any address."""

_NUMBERS = {"np.float32": types.float32, "bool": types.boolean}  # by annotation


@cache
def load(name: str, present: tuple[bool, ...], guarded: bool) -> Callable[..., None]:
    """Return a kernel compiled for the arrays that are ``present``.

    Its code is cached, beside the loop's file or else in the user's cache directory, so compiling
    takes its second once. The kernel runs without the GIL.
    """
    formula = FORMULAS[name]
    arrays = _tuple_of([_FLAT if there else types.none for there in present])
    # A formula's parameters are the parameter, the gradient, the slots, and then the numbers.
    last = list(inspect.signature(formula).parameters.values())[len(present) :]
    numbers = _tuple_of([_NUMBERS[parameter.annotation] for parameter in last])
    areas, progress = (arrays, types.int64[::1]) if guarded else (types.none, types.none)
    scalars = (types.intp, types.float32, types.float32)  # start, share, l2
    return _load(name, loop_of(formula), (arrays, _GRADIENT, *scalars, numbers, areas, progress))


@cache
def load_scaled_sum() -> Callable[..., None]:
    return _load("scaled_sum", scaled_sum, (_FLAT, _GRADIENT, _GRADIENT, types.float32))


def _load(
    name: str, function: Callable[..., None], signature: tuple[Any, ...]
) -> Callable[..., None]:
    try:
        return _compiled(function, signature, cache=True)
    except Exception as error:  # nowhere to write, a full disk, or whatever a damaged file gives
        log.info("kernel %s is compiled without a cache: %r", name, error)
        return _compiled(function, signature, cache=False)


def _compiled(
    function: Callable[..., None], signature: tuple[Any, ...], cache: bool
) -> Callable[..., None]:
    compiled: Callable[..., None] = numba.njit(
        signature, nogil=True, error_model="numpy", cache=cache
    )(function)
    return compiled
