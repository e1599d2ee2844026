"""Locks of a segment's file, which show which processes live.

A ps holds the flock of its segment, a worker locks the bytes of its gradient. Each lock has a
descriptor of its own, which neither a mapping nor a forked child keeps open.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Callable
from pathlib import Path

from zmqtrain.errors import SegmentError

_RANGE = struct.Struct("hhqqi4x")  # struct flock

_locks: set[int] = set()
"""Descriptors that hold locks of this process."""


def own(path: Path, descriptor: int) -> int:
    """Take the flock of this open file; return the lock.

    Raises:
        BlockingIOError: another process has it.
        SegmentError: the file has no name any more, or another file has it.
    """
    return _locked(path, descriptor, lambda lock: fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB))


def hold(path: Path, descriptor: int, at: int) -> int:
    """Lock the byte at ``at`` of this open file; return the lock.

    Raises:
        OSError: another process has locked it.
        SegmentError: the file has no name any more, or another file has it.
    """
    byte = _range(at, 1)
    return _locked(path, descriptor, lambda lock: fcntl.fcntl(lock, fcntl.F_OFD_SETLK, byte))


def release(lock: int) -> None:
    if lock in _locks:
        _locks.remove(lock)
        os.close(lock)


def is_held(descriptor: int, at: int | None = None) -> bool:
    """Return whether some process has locked the byte at ``at``, or any byte, of this open file."""
    wanted = _range(0, 0) if at is None else _range(at, 1)  # 0 bytes are all from there on
    found = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, wanted)
    return bool(_RANGE.unpack(found)[0] != fcntl.F_UNLCK)


def owned_and_held(path: Path) -> tuple[bool, bool]:
    """Return whether a live ps owns the segment at ``path``, and whether a worker locks a byte."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        # Shared: two processes that check at the same time must not see each other as the owner.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False, is_held(descriptor)
    except BlockingIOError:
        return True, is_held(descriptor)
    finally:
        os.close(descriptor)


def _range(at: int, nbytes: int) -> bytes:
    return _RANGE.pack(fcntl.F_WRLCK, os.SEEK_SET, at, nbytes, 0)


def _locked(path: Path, descriptor: int, take: Callable[[int], object]) -> int:
    """Return another descriptor of this open file, which ``take`` has locked."""
    try:
        lock = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise SegmentError(f"{path} cannot be opened again: {error.strerror}") from error
    _locks.add(lock)
    try:
        if not os.path.samestat(os.fstat(lock), os.fstat(descriptor)):
            raise SegmentError(f"{path} is another file by now")
        take(lock)
    except BaseException:
        release(lock)
        raise
    return lock


def _forget_locks() -> None:
    """They are the parent's: a child that outlives it would make it look alive."""
    for lock in tuple(_locks):
        release(lock)


os.register_at_fork(after_in_child=_forget_locks)
