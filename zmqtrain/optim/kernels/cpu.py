"""Updates on the CPU, compiled by Numba into one pass over memory; they run without the GIL.

Numba's cache keeps compiled code for each user, version of these sources and of Numba, and type of
processor. Compiling takes a second or two, loading 10 ms. Importing Numba takes half a second and
some 100 MB of memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import inspect
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from zmqtrain.compute.arrays import Flat
from zmqtrain.optim.formula import Formula, LayerRule
from zmqtrain.optim.kernels.base import Memory, warn
from zmqtrain.optim.kernels.loops import loop_of
from zmqtrain.optim.redo import KERNEL_BLOCK

log = logging.getLogger(__name__)

_OPTIONS: Any = {"nogil": True, "error_model": "numpy"}  # error_model: no checks of divisors
_ONE = np.float32(1)
_lock = threading.Lock()  # Numba's configuration is global


def bind(memory: Memory) -> CpuKernel | None:
    """Return the compiled kernel for this memory; None, with a warning, if there cannot be one.

    Raises:
        TypeError: it could not write to the memory.
    """
    arrays = tuple(array is not None for array in memory.arrays)
    is_layered, has_l2 = isinstance(memory.rule, LayerRule), memory.l2 is not None
    code = _loaded(memory.rule.formula, arrays, is_layered, has_l2, memory.redo is not None)
    return None if code is None else CpuKernel(memory, code)


class CpuKernel:
    """A formula, compiled for the CPU."""

    def __init__(self, memory: Memory, code: Any) -> None:
        self.code = code
        self._size = size = len(memory.parameters)
        self._rule, self._l2 = memory.rule, memory.l2
        self._arrays, self._copies = memory.arrays, memory.copies
        self._progress = None if memory.redo is None else memory.redo.progress
        for array in self._arrays:
            _check(array, size, or_longer=False)
        for copy in self._copies or ():
            _check(copy, min(size, KERNEL_BLOCK), or_longer=True)
        if self._progress is not None:
            _check_progress(self._progress)

    def __call__(
        self,
        gradient: Flat,
        start: int,
        step: int,
        scale: np.float32,
        share: np.float32 | None,
        factor: np.float32 | None,
    ) -> None:
        stop = start + len(gradient)
        if stop > self._size:
            raise ValueError(
                f"a gradient from {start} to {stop}; expected at most {self._size} elements"
            )
        self.code(
            self._arrays,
            _as_compiled(gradient),
            start,
            self._rule.hyperparameters(step),
            factor,
            scale,
            self._l2,
            share,
            self._copies,
            self._progress,
        )


@cache
def _loaded(
    formula: Formula, are_there: tuple[bool, ...], has_factor: bool, has_l2: bool, guarded: bool
) -> Any:
    """Return the compiled loop of a formula for these arrays and numbers, None if that fails."""
    array = np.empty(0, np.float32)
    arrays = tuple(array if is_there else None for is_there in are_there)
    slots = len(are_there) - 2  # without parameters and average
    taken = list(inspect.signature(formula).parameters.values())[2 + slots :]
    arguments = (
        arrays,
        array,
        0,
        tuple(number.annotation in (bool, "bool") or _ONE for number in taken),
        _ONE if has_factor else None,
        _ONE,
        _ONE if has_l2 else None,
        _ONE if are_there[-1] else None,
        arrays if guarded else None,
        np.zeros(2, np.int64) if guarded else None,
    )
    name = f"{formula.__qualname__}-{''.join('01'[is_there] for is_there in are_there)}"
    name += "-factor" * has_factor + "-l2" * has_l2 + "-guarded" * guarded
    with _lock:
        try:
            return _compiled(loop_of(formula), name, formula, arguments)
        except Exception as error:  # a compiler may raise anything
            warn(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
            return None


def _compiled(loop: Callable[..., None], name: str, formula: Formula, arguments: Any) -> Any:
    directory: Path | None = None
    try:
        directory = cache_directory(formula) / name
        with _locked(directory):
            code = _declared(loop, directory)
            code(*arguments)
    except Exception as error:
        log.info("the cache of compiled kernels cannot be used: %r", error)
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)  # it may be damaged
        code = numba.njit(**_OPTIONS)(loop)
        code(*arguments)
    return code


def _declared(loop: Callable[..., None], directory: Path) -> Any:
    """Let Numba cache this loop in a separate directory.

    Kernels in one directory share an index. If two processes write it at once, an entry can name
    the wrong code.
    """
    config: Any = numba.config
    before = config.CACHE_DIR
    config.CACHE_DIR = str(directory)  # read only when the loop is declared
    try:
        return numba.njit(cache=True, **_OPTIONS)(loop)
    finally:
        config.CACHE_DIR = before


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Lock a directory, so that one process at a time compiles or loads a kernel.

    Raises:
        OSError: the directory cannot be written, or others can write to it.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:
        found = os.fstat(lock.fileno())
        parent = directory.stat()
        if {found.st_uid, parent.st_uid} != {os.geteuid()} or parent.st_mode & 0o022:
            raise PermissionError(f"others can write to {directory}")
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@cache
def cache_directory(formula: Formula) -> Path:
    """Return the cache directory for the code of a formula; it depends on these sources.

    Raises:
        OSError, RuntimeError, TypeError: the user has no home, or the formula no file.
    """
    given = os.environ.get("XDG_CACHE_HOME", "")
    caches = Path(given if os.path.isabs(given) else "~/.cache").expanduser() / "zmqtrain"
    optim = Path(__file__).parents[1]
    sources = [*sorted(optim.glob("*.py")), *sorted(optim.glob("kernels/*.py"))]
    digest = hashlib.blake2b(digest_size=8)
    for source in (*sources, Path(inspect.getfile(formula))):
        digest.update(source.read_bytes())
    config: Any = numba.config
    return Path(config.CACHE_DIR or caches) / f"kernels-{digest.hexdigest()}"


def _as_compiled(gradient: Flat) -> Flat:
    """Return a contiguous, aligned float32 array; a received frame may be unaligned."""
    flags = gradient.flags
    if gradient.dtype == np.float32 and flags.carray:
        return gradient
    return np.array(gradient, np.float32)


def _check(array: Flat | None, size: int, *, or_longer: bool) -> None:
    if array is None:
        return
    is_long = len(array) >= size if or_longer else len(array) == size
    if not (is_long and array.dtype == np.float32 and array.flags.carray):
        raise TypeError(
            f"{len(array)} elements of {array.dtype} with strides {array.strides}; expected {size} "
            "of float32, contiguous, writable and aligned"
        )


def _check_progress(progress: NDArray[np.int64]) -> None:
    if progress.shape != (2,) or progress.dtype != np.int64 or not progress.flags.carray:
        raise TypeError(f"progress of {progress.shape} {progress.dtype}; expected 2 int64")
