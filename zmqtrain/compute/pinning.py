"""Host memory that is registered with CUDA, for exactly as long as it exists.

CUDA copies from and to registered memory by its physical pages. If memory is freed while it is
registered, and its addresses are given to another array, CUDA goes on copying the old pages. So a
registration belongs to the array at the root of all views of the memory. The callback that ends it
with that array holds the owner of the memory until then. An array that owns its memory itself is
not registered: from NumPy 2.5 on it frees the memory before it runs callbacks, as an mmap does.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
import weakref
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zmqtrain.compute.arrays import PAGES_FROM_NBYTES, Flat

log = logging.getLogger(__name__)

_PORTABLE = 1  # cudaHostRegisterPortable: for all devices
_READ_ONLY = 8  # cudaHostRegisterReadOnly, for which CuPy has no name
_NOWHERE = range(0)


class Pinning:
    """The memory that this process has registered through one CuPy module.

    CUDA registers whole pages. So only pages that belong to the root array alone are registered.
    Small arrays, which share pages with others, are not: see :func:`zeros`.
    """

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda
        # Re-entrant: the garbage collector may end an array, and its registration, at any time.
        self._lock = threading.RLock()
        self._registered: dict[int, range] = {}  # addresses by id of the root; nowhere: refused
        self._pid = os.getpid()

    def pin(self, flat: Flat) -> bool:
        """Register the memory of an array unless it is; return whether it is registered.

        CUDA may refuse: some drivers do not register read-only memory, others limit its size. Or
        code that is not ours has registered part of the memory.
        """
        root = _root(flat)
        with self._lock:
            is_large = flat.nbytes >= PAGES_FROM_NBYTES
            if id(root) not in self._registered and is_large and root.base is not None:
                self._registered[id(root)] = self._register(root, _own_pages(root))
            return self.is_pinned(flat)

    def is_pinned(self, flat: Flat) -> bool:
        """Return whether all of an array's memory is registered by :meth:`pin`."""
        pages, start = self._registered.get(id(_root(flat)), _NOWHERE), flat.ctypes.data
        return flat.nbytes > 0 and start in pages and start + flat.nbytes - 1 in pages

    def _register(self, root: NDArray[Any], pages: range) -> range:
        """Register these pages until the root ends; return nowhere if CUDA refuses."""
        device = self._cuda.Device()
        weakref.finalize(root, self._end, id(root), device, root.base).atexit = False
        if not pages or any(_overlap(pages, other) for other in list(self._registered.values())):
            return _NOWHERE
        is_read_only = not root.flags.writeable
        flags = _PORTABLE | (_READ_ONLY if is_read_only else 0)
        runtime = self._cuda.runtime
        try:
            runtime.hostRegister(pages.start, len(pages), flags)
        except runtime.CUDARuntimeError as error:
            level = logging.DEBUG if is_read_only else logging.WARNING
            log.log(level, "%d B of host memory are copied more slowly: %s", len(pages), error)
            return _NOWHERE
        return pages

    def _end(self, key: int, device: Any, owner: Any) -> None:
        """End a registration; ``device``: where it was made, lest CUDA starts to use another.

        ``owner``: the owner of the memory, which frees it after this call.
        """
        with self._lock:
            pages = self._registered.pop(key, _NOWHERE)
            if pages and os.getpid() == self._pid:  # a registration does not survive a fork
                runtime = self._cuda.runtime
                try:
                    with device:
                        runtime.hostUnregister(pages.start)
                except runtime.CUDARuntimeError as error:  # after any other error of the device
                    log.error(
                        "%d B of host memory stay registered with CUDA: %s", len(pages), error
                    )


_PINNINGS: weakref.WeakKeyDictionary[ModuleType, Pinning] = weakref.WeakKeyDictionary()


def pinning_of(cupy: ModuleType) -> Pinning:
    """Return the only object that registers memory through this module."""
    return _PINNINGS.setdefault(cupy, Pinning(cupy.cuda))


def _root(array: NDArray[Any]) -> NDArray[Any]:
    """Return the array that all views of the memory keep alive, and that keeps alive its owner."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _own_pages(root: NDArray[Any]) -> range:
    """Return the addresses of the pages that nothing but this array and its owner has a part of."""
    start, page = root.ctypes.data, mmap.PAGESIZE
    stop = start + root.nbytes
    owner = getattr(root.base, "obj", root.base)  # NumPy keeps a memoryview of a buffer's owner
    if isinstance(owner, mmap.mmap):  # which begins and ends with a page
        return range(start // page * page, -(-stop // page) * page)
    return range(-(-start // page) * page, stop // page * page)


def _overlap(one: range, other: range) -> bool:
    return max(one.start, other.start) < min(one.stop, other.stop)
