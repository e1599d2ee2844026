"""Helpers that let one model run on NumPy and CuPy."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from zmqtrain.models.base import Array


def is_on_gpu(array: Array) -> bool:
    """Return whether this is a CuPy array, without importing CuPy."""
    device_array = getattr(sys.modules.get("cupy"), "ndarray", None)
    return device_array is not None and isinstance(array, device_array)


def array_module(*arrays: Array) -> ModuleType:
    """Return ``cupy`` if any of ``arrays`` is a CuPy array, else ``numpy``."""
    return sys.modules["cupy"] if any(map(is_on_gpu, arrays)) else np


def on_host(array: Array) -> Array:
    """Return an array of NumPy, copied if it is on a GPU."""
    return array.get() if is_on_gpu(array) else array


def quiet() -> np.errstate:
    """Silence NumPy's warnings in a step: NaN and infinity are counted and reported later."""
    return np.errstate(over="ignore", invalid="ignore", divide="ignore")


class Scratch(threading.local):
    """Buffers that one model reuses from step to step; every thread has its own.

    It keeps the buffers of the last request alone, as batch sizes may vary. A copy has no buffers.
    """

    def __init__(self) -> None:
        self._request: tuple[Any, ...] = ()
        self._arrays: list[Array] = []

    def arrays(self, like: Array, rows: int, widths: Sequence[int]) -> list[Array]:
        """Return an uninitialised array (rows, width) for each width, with ``like``'s dtype and
        module. The next call may return the same memory."""
        xp = array_module(like)
        request = (xp, like.dtype, rows, widths)
        if self._request != request:
            self._arrays = [xp.empty((rows, width), like.dtype) for width in widths]
            self._request = request
        return self._arrays

    def __reduce__(self) -> tuple[type[Scratch], tuple[()]]:
        return Scratch, ()
