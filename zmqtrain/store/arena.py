"""Memory that grows in place: a sparse file, mapped once, of which some ranges are reserved."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from zmqtrain.errors import SegmentError
from zmqtrain.hints import explaining
from zmqtrain.store.segment import REMEDY, reserve

PAGE = mmap.ALLOCATIONGRANULARITY


class Arena:
    """A sparse file in memory. Pages that were never written are zero, and take no memory.

    ``path``: path of the file, None for private memory. Arrays over it stay valid while in use.
    """

    def __init__(self, descriptor: int, path: Path | None, *, writable: bool = True) -> None:
        """
        Raises:
            SegmentError: this process has no room for its addresses.
        """
        self.path, self.descriptor = path, descriptor
        weakref.finalize(self, os.close, descriptor)
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        nbytes = os.fstat(descriptor).st_size
        try:
            self.memory = mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED, access)
        except (OSError, ValueError, OverflowError) as error:
            raise SegmentError(
                f"{path or 'the memory of tables'} cannot be mapped: {error}; expected "
                f"{nbytes >> 30} GiB of addresses, most of which take no memory: see ulimit -v"
            ) from error
        self.address = np.frombuffer(self.memory, np.uint8, 1).ctypes.data

    def ints(self, at: int, count: int) -> NDArray[np.int64]:
        return np.frombuffer(self.memory, np.int64, count, at)

    def floats(self, at: int, count: int) -> NDArray[np.float32]:
        return np.frombuffer(self.memory, np.float32, count, at)

    def reserve(self, at: int, nbytes: int) -> None:
        """Allocate memory for a range now.

        Raises:
            SegmentError: the file system has no room.
        """
        if self.path is not None and nbytes > 0:
            reserve(self.descriptor, at, nbytes, self.path)

    def release(self, at: int, nbytes: int) -> None:
        """Give back the memory of a range of whole pages, which is zero from then on."""
        with suppress(AttributeError, OSError):  # not every system and file system can
            self.memory.madvise(mmap.MADV_REMOVE, at, nbytes)
            return
        self.ints(at, nbytes // 8)[:] = 0


def private_file(nbytes: int) -> int:
    """Return the descriptor of a new file without a name."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("zmqtrain-tables", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    _resize(descriptor, nbytes)
    return descriptor


def _resize(descriptor: int, nbytes: int) -> None:
    """Give a new file its size; close it if that fails."""
    try:
        os.ftruncate(descriptor, nbytes)
    except BaseException:
        os.close(descriptor)
        raise


def create_arena(path: Path, nbytes: int) -> Arena:
    """Make a new file of mode 0600.

    Raises:
        SegmentError: the file system refuses.
    """
    with explaining(f"{path} cannot be made", REMEDY, SegmentError):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        _resize(descriptor, nbytes)
    return Arena(descriptor, path)


def space_of(directory: Path | None) -> int:
    """Return how many bytes a file can have at most: in a directory, or in memory (None)."""
    if directory is None:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found = os.statvfs(directory)
    return found.f_blocks * found.f_frsize
