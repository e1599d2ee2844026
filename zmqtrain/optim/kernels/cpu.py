"""The fused kernels for the CPU: compiled code that is called with the addresses of arrays.

They run without the GIL.
"""

from __future__ import annotations

import ctypes
import logging
import os
import struct
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zmqtrain.compute.arrays import Flat
from zmqtrain.optim.kernels import machine_code
from zmqtrain.optim.kernels.base import Kernel, Numbers, Operands
from zmqtrain.optim.redo import BLOCK

log = logging.getLogger(__name__)

_POINTER, _INDEX, _FLOAT = ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_float
_KERNEL = ctypes.CFUNCTYPE(None, *(_POINTER,) * 4, _INDEX, _INDEX, _FLOAT, _FLOAT, _POINTER)
_SCALED_SUM = ctypes.CFUNCTYPE(None, _POINTER, _POINTER, _POINTER, _FLOAT, _INDEX)
_NOTHING = ctypes.c_char * 0

COMPILE_TIMEOUT_S = 300.0
"""Many times what it takes."""


def load(name: str, present: tuple[bool, ...], guarded: bool) -> Any:
    """Return a kernel's code.

    Compiling takes seconds, once for a user, a processor, and a version of all that compiles.
    """
    which = "".join("01"[there] for there in present)
    return _KERNEL(_address_of(f"{name}-{which}" + "-guarded" * guarded))


@cache
def load_scaled_sum() -> Any:
    """Return the code of :func:`scaled_sum`."""
    return _SCALED_SUM(_address_of("scaled_sum"))


class _Bound:
    """A kernel together with its operands, whose addresses it is given."""

    def __init__(self, code: Any, operands: Operands) -> None:
        self._code, self._l2 = code, operands.l2
        self._operands = operands  # whose addresses are used as long as this lives
        self._size = size = next(len(array) for array in operands.arrays if array is not None)
        self._places = (
            _table(operands.arrays, size),
            _table(operands.areas or (), min(BLOCK, size), or_longer=True),
            None if operands.progress is None else _address_of_progress(operands.progress),
        )

    def __call__(self, gradient: Flat, start: int, share: np.float32, numbers: Numbers) -> None:
        stop = start + len(gradient)
        if stop > self._size:
            raise ValueError(
                f"a gradient from {start} to {stop}; expected at most {self._size} elements"
            )
        gradient = _readable(gradient)
        packed = struct.pack(f"{len(numbers)}f", *numbers)
        self._code(*self._places, _address(gradient), start, stop, share, self._l2, packed)


def bind(code: Any, operands: Operands) -> Kernel:
    return _Bound(code, operands)


def scaled_sum(out: Flat, a: Flat, b: Flat, scale: np.float32) -> None:
    _check(out, len(out), or_longer=False)
    if not len(a) == len(b) == len(out):
        raise ValueError(f"a sum of {len(a)} and {len(b)} elements; expected {len(out)} of each")
    a, b = _readable(a), _readable(b)
    load_scaled_sum()(_address(out), _address(a), _address(b), scale, len(out))


def _readable(gradient: Flat) -> Flat:
    """Return float32 one behind the other at a float's address; frames lie at any."""
    flags = gradient.flags
    if gradient.dtype == np.float32 and flags.c_contiguous and flags.aligned:
        return gradient
    return np.array(gradient, np.float32)


def _check(array: Flat, size: int, *, or_longer: bool) -> None:
    is_long = len(array) >= size if or_longer else len(array) == size
    if not (is_long and array.dtype == np.float32 and array.flags.carray):
        raise TypeError(
            f"{len(array)} elements of {array.dtype} with strides {array.strides}; expected {size} "
            "of float32, one behind the other, writable and aligned"
        )


def _address(array: Any) -> int:
    """Return where the elements lie; ``array.ctypes.data`` takes three times as long."""
    try:
        return ctypes.addressof(_NOTHING.from_buffer(array))
    except TypeError:  # read-only
        address: int = array.ctypes.data
        return address


def _address_of_progress(progress: NDArray[np.int64]) -> int:
    if progress.shape != (2,) or progress.dtype != np.int64 or not progress.flags.carray:
        raise TypeError(f"progress of {progress.shape} {progress.dtype}; expected 2 int64")
    return _address(progress)


def _table(
    arrays: Sequence[Flat | None], size: int, *, or_longer: bool = False
) -> ctypes.Array[ctypes.c_void_p]:
    for array in arrays:
        if array is not None:
            _check(array, size, or_longer=or_longer)
    return (_POINTER * len(arrays))(*(a if a is None else _address(a) for a in arrays))


def _address_of(symbol: str) -> int:
    """Place the code that is kept, or else have it compiled."""
    code = machine_code.kept(symbol)
    return machine_code.place(_compiled(symbol) if code is None else code)


def _compiled(symbol: str) -> bytes:
    """Have a process of its own compile: Numba takes memory for good, and the GIL for seconds.

    That process keeps the code, even if this one ends before. It imports what this one would.

    Raises:
        RuntimeError, OSError, SubprocessError: it failed, for the reason that is told.
    """
    environ = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    environ["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, sys.path))
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "zmqtrain.optim.kernels.compiler", symbol],
        env=environ,
        cwd="/",  # Numba looks for its settings there
        stdin=subprocess.DEVNULL,
        capture_output=True,
        start_new_session=True,  # Ctrl-C is for this process alone
        timeout=COMPILE_TIMEOUT_S,
    )
    said = ended.stderr.decode(errors="replace").strip()
    if ended.returncode:
        _, _, last = said.rpartition("\n")
        raise RuntimeError(f"the compiler ended with code {ended.returncode}: {last}")
    if said:
        log.info("the compiler of %s said: %s", symbol, said)
    code = machine_code.opened(symbol, ended.stdout) or machine_code.kept(symbol)
    if code is None:
        raise RuntimeError(f"the compiler gave no code, but {ended.stdout!r:.80}")
    return code
