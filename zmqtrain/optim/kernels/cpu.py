"""The fused kernels for the CPU: compiled code that is called with the addresses of arrays.

They run without the GIL.
"""

from __future__ import annotations

import ctypes
import logging
import struct
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zmqtrain.optim.base import Flat
from zmqtrain.optim.kernels import machine_code
from zmqtrain.optim.kernels.base import Kernel, Numbers

log = logging.getLogger(__name__)

_POINTER, _INDEX, _FLOAT = ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_float
_KERNEL = ctypes.CFUNCTYPE(None, *(_POINTER,) * 4, _INDEX, _INDEX, _FLOAT, _FLOAT, _POINTER)
_NOTHING = ctypes.c_char * 0
_SCALED_SUM = ctypes.CFUNCTYPE(None, _POINTER, _POINTER, _POINTER, _FLOAT, _INDEX)


def bind(
    name: str,
    arrays: Sequence[Flat | None],
    l2: np.float32,
    areas: Sequence[Flat | None] | None,
    progress: NDArray[np.int64] | None,
) -> Kernel:
    """Return a kernel for these arrays.

    Compiling takes seconds, once for a user, a processor, and a version of all that compiles.
    """
    kernel = _load(name, tuple(array is not None for array in arrays), areas is not None)
    size = next(len(array) for array in arrays if array is not None)
    places = _table(arrays), _table(areas or ()), None if progress is None else _address(progress)

    def update(gradient: Flat, start: int, share: np.float32, numbers: Numbers) -> None:
        stop = start + len(gradient)
        if stop > size:
            raise ValueError(f"a gradient from {start} to {stop}; expected at most {size} elements")
        gradient = _readable(gradient)
        packed = struct.pack(f"{len(numbers)}f", *numbers)
        kernel(*places, _address(gradient), start, stop, share, l2, packed)

    return update


def scaled_sum(out: Flat, a: Flat, b: Flat, scale: np.float32) -> None:
    """out = (a + b) * scale. ``out`` is neither ``a`` nor ``b``."""
    a, b = _readable(a), _readable(b)
    load_scaled_sum()(_address(out), _address(a), _address(b), scale, len(out))


def _readable(gradient: Flat) -> Flat:
    """Return float32 one behind the other at a float's address; frames lie at any."""
    flags = gradient.flags
    if gradient.dtype == np.float32 and flags.c_contiguous and flags.aligned:
        return gradient
    return np.array(gradient, np.float32)


def _address(array: Any) -> int:
    """Return where the elements lie; ``array.ctypes.data`` takes three times as long."""
    try:
        return ctypes.addressof(_NOTHING.from_buffer(array))
    except TypeError:  # read-only
        address: int = array.ctypes.data
        return address


def _table(arrays: Sequence[Flat | None]) -> ctypes.Array[ctypes.c_void_p]:
    for array in arrays:
        if array is not None and not (array.dtype == np.float32 and array.flags.carray):
            raise TypeError(
                f"an array of {array.dtype} with strides {array.strides}; expected float32, one "
                "behind the other, writable and aligned"
            )
    return (_POINTER * len(arrays))(*(a if a is None else _address(a) for a in arrays))


@cache
def _load(name: str, present: tuple[bool, ...], guarded: bool) -> Any:
    from_ = "".join("01"[there] for there in present)
    symbol = f"{name}-{from_}" + "-guarded" * guarded

    def compiled() -> tuple[str, str]:
        from zmqtrain.optim.kernels.compiler import compile_kernel

        return compile_kernel(name, present, guarded)

    return _KERNEL(_address_of(symbol, compiled))


@cache
def load_scaled_sum() -> Any:
    def compiled() -> tuple[str, str]:
        from zmqtrain.optim.kernels.compiler import compile_scaled_sum

        return compile_scaled_sum()

    return _SCALED_SUM(_address_of("scaled_sum", compiled))


def _address_of(symbol: str, compiled: Callable[[], tuple[str, str]]) -> int:
    """Link the code that is kept, or else compile it, and keep it if that can be."""
    code = machine_code.find(symbol)
    if code is None:
        code = machine_code.emit(*compiled(), symbol)
        try:
            machine_code.keep(symbol, code)
        except (OSError, RuntimeError) as error:
            log.info("the compiled kernel %s is not kept: %r", symbol, error)
    return machine_code.link(code, symbol)
