"""A shard's memory, which other processes of the host may map: one segment.

segment_layout.py describes its regions.

A segment is a file (in /dev/shm by default) or, if no other process may see it and it need not
outlive its process, private memory. Only the gradients grow in number, at the end of the file, and
every one is mapped by itself, so nothing that is mapped ever moves. A worker maps the parameters
read-only and one gradient; one that makes steps over the board maps all, to write to its slices.

Locks of the file show which processes live: see locks.py.
"""

from __future__ import annotations

import mmap
import os
import secrets
import stat
import weakref
from abc import ABC, abstractmethod
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from zmqtrain.compute.arrays import Flat, read_only
from zmqtrain.errors import SegmentError
from zmqtrain.files import open_file
from zmqtrain.hints import explaining
from zmqtrain.store import locks
from zmqtrain.store.segment_files import remove_files
from zmqtrain.store.segment_layout import (
    FIGURES,
    FIXED,
    LAYOUT_VERSION,
    MAGIC,
    PROGRESS_AT,
    PROGRESS_STRIDE,
    SegmentLayout,
)
from zmqtrain.transport import own_directory
from zmqtrain.units import data_size

REMEDY = (
    "expected a directory that this user can write; correct --segment-dir (or ZMQTRAIN_SEGMENT_DIR)"
)
_Lane = Literal["memory", "shm"]
_INSIDE = "process:"  # and a token: the name of a private segment

_private: weakref.WeakValueDictionary[str, Segment] = weakref.WeakValueDictionary()


class Segment:
    """The memory of one shard, as its ps sees it. Arrays stay valid as long as they are referenced.

    ``name`` is what :func:`reach` takes. A process that knows its ``nonce``, which is unique to
    this segment, has reached this very memory. ``path`` is None if the memory is private.
    """

    def __init__(
        self,
        layout: SegmentLayout,
        path: Path | None,
        descriptor: int | None,
        nonce: str = "",
        lock: int | None = None,
        *,
        writable: bool = True,
    ) -> None:
        """Use :meth:`private`, :meth:`create` or :meth:`adopt`, which knows the ``nonce``.

        ``lock``: the descriptor whose flock shows that the ps lives, None in other processes.
        ``writable``: whether to map more than gradients to write to it.
        """
        self.layout = layout
        self.path = path
        self.name = str(path) if path is not None else _INSIDE + secrets.token_hex(8)
        self.nonce = nonce or secrets.token_hex(16)
        self._descriptor, self._lock = descriptor, lock
        self._gradients: dict[int, tuple[Flat, NDArray[np.float64], NDArray[np.uint8]]] = {}
        # Gradients reached from this process, and their holders.
        self.holders: weakref.WeakValueDictionary[int, _Inside] = weakref.WeakValueDictionary()
        memory = _map(descriptor, layout.gradients_at, writable=writable)
        if not nonce:
            fixed = (MAGIC, LAYOUT_VERSION, len(layout.slots), bytes.fromhex(self.nonce))
            FIXED.pack_into(memory, 0, *fixed, layout.size)
        whole = memoryview(memory)
        self.words = whole[layout.words].cast("q")
        self.change = whole[layout.change].cast("q")
        self.board = np.frombuffer(whole[layout.board], np.int64)
        self.marks = whole[layout.marks]
        self.journal = whole[layout.journal]
        self.parameters = _flat(memory, layout.parameters_at, layout.size)
        self.slots = {name: _flat(memory, at, layout.size) for name, at in layout.slots_at.items()}
        self.sum = _flat(memory, layout.sum_at, layout.size)
        self.factors = _flat(memory, layout.factors_at, layout.variables)
        counts = np.frombuffer(memory, np.int64, 2 * layout.variables, layout.missed_at)
        self.missed = counts.reshape(2, layout.variables)
        self.absent_of_sum = _absent(memory, layout.absent_of_sum_at, layout.variables)
        self._memory = memory

    @classmethod
    def private(cls, layout: SegmentLayout) -> Segment:
        """Make a segment that only this process can reach."""
        segment = cls(layout, None, None)
        _private[segment.name] = segment
        return segment

    @classmethod
    def create(cls, layout: SegmentLayout, path: Path) -> Segment:
        """Make a segment as a file of mode 0600, in place of one that a dead process left.

        Raises:
            SegmentError: a live process owns a segment of this path, the directory is not ours
                alone, or its file system has no room or refuses.
        """
        path = path.absolute()  # others look for it from where they are
        own_directory.make(path.parent, REMEDY, SegmentError)
        with explaining(f"{path} cannot be made", REMEDY, SegmentError), ExitStack() as failed:
            if path.exists() and locks.owned_and_held(path)[0]:
                raise SegmentError(f"{path} belongs to a live ps; expected a path of its own")
            # Not written over: a worker of the dead ps may have it mapped.
            remove_files(path)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            failed.callback(os.close, descriptor)
            failed.callback(path.unlink, missing_ok=True)
            lock = locks.own(path, descriptor)
            failed.callback(locks.release, lock)
            reserve(descriptor, 0, layout.gradients_at, path)
            segment = cls(layout, path, descriptor, lock=lock)
            failed.pop_all()
        return segment

    @classmethod
    def adopt(cls, layout: SegmentLayout, path: Path) -> Segment | None:
        """Take over the segment of a dead ps at ``path``; return None without one of this layout.

        Raises:
            SegmentError: a live process owns it, it may not be opened, or it is not ours alone.
        """
        path = path.absolute()
        with ExitStack() as failed:
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            except FileNotFoundError:
                return None
            except OSError as error:
                raise SegmentError(
                    f"{path} cannot be opened: {error.strerror}; {REMEDY}"
                ) from error
            failed.callback(os.close, descriptor)
            # Another user may have made both before this one had any.
            own_directory.check(path.parent, REMEDY, SegmentError)
            if os.fstat(descriptor).st_uid != os.geteuid():
                raise SegmentError(f"{path} is another user's; {REMEDY}")
            try:
                lock = locks.own(path, descriptor)
            except BlockingIOError:
                raise SegmentError(
                    f"{path} belongs to a live ps; expected a path of its own"
                ) from None
            failed.callback(locks.release, lock)
            magic, version, slots, nonce, size = _fixed(descriptor)
            is_whole = os.fstat(descriptor).st_size >= layout.gradients_at
            expected = MAGIC, LAYOUT_VERSION, len(layout.slots), layout.size
            if not is_whole or (magic, version, slots, size) != expected:
                return None
            segment = cls(layout, path, descriptor, nonce.hex(), lock)
            failed.pop_all()
        return segment

    def close(self) -> None:
        """Close the segment and leave its file for the next life of this ps."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        if self._lock is not None:
            locks.release(self._lock)
            self._lock = None  # its number may be that of another lock by the next call

    def gradient(self, number: int) -> Flat:
        """Return gradient ``number``, float32 of shape (size,), allocated at its first use.

        Raises:
            SegmentError: the file system has no room.
        """
        return self._buffer(number)[0]

    def figures(self, number: int) -> NDArray[np.float64]:
        """Return the figures that the holder of gradient ``number`` reports, shape (FIGURES,)."""
        return self._buffer(number)[1]

    def absent(self, number: int) -> NDArray[np.uint8]:
        """Return ABSENT of gradient ``number``, shape (1 + variables,)."""
        return self._buffer(number)[2]

    def note_absent(self, number: int, variables: Collection[int]) -> None:
        """Note of which variables gradient ``number`` has none."""
        absent = self.absent(number)
        if variables or absent.item(0):
            absent.fill(0)
            absent[[0, *(1 + variable for variable in variables)]] = bool(variables)

    def _buffer(self, number: int) -> tuple[Flat, NDArray[np.float64], NDArray[np.uint8]]:
        found = self._gradients.get(number)
        if found is None:
            at, layout = self.layout.gradient_at(number), self.layout
            if self._descriptor is not None and self.path is not None:
                reserve(self._descriptor, at, layout.gradient_stride, self.path)
            memory = _map(self._descriptor, layout.gradient_stride, at)
            figures = np.frombuffer(memory, np.float64, FIGURES, layout.figures_at)
            absent = _absent(memory, layout.absent_at, layout.variables)
            found = self._gradients[number] = _flat(memory, 0, layout.size), figures, absent
        return found

    def redo(self, part: int) -> tuple[list[Flat], NDArray[np.int64]]:
        """Return the redo area of a part: copies of parameters and slots, and progress."""
        starts = self.layout.redo_copies_at(part)
        copies = [_flat(self._memory, at, self.layout.redo_size) for at in starts]
        words = np.frombuffer(self._memory, np.int64, 2, PROGRESS_AT + part * PROGRESS_STRIDE)
        return copies, words

    def is_held(self, number: int) -> bool:
        """Return whether some process has gradient ``number`` mapped to write to it.

        In this process an object that reached it holds it for as long as the object lives.
        """
        if self._descriptor is None:
            return number in self.holders
        return locks.is_held(self._descriptor, self.layout.gradient_at(number))

    def remove(self) -> None:
        """Remove the segment's file, and its tables. Processes that map them keep the memory."""
        if self.path is not None and self._descriptor is not None:
            remove_files(self.path)
            self.close()


class Reached(ABC):
    """A ps's segment as one of its workers, or the chief, sees it: all but gradients read-only."""

    lane: ClassVar[_Lane]

    def __init__(self, segment: Segment) -> None:
        self.nonce, self.words, self.board = segment.nonce, segment.words, segment.board
        self.parameters = read_only(segment.parameters)
        self.slots = {name: read_only(slot) for name, slot in segment.slots.items()}

    @abstractmethod
    def gradient(self, number: int) -> Flat:
        """Return gradient ``number``, to write to for as long as this object lives.

        Raises:
            SegmentError: another process holds it, or the segment has none of this number.
        """

    @abstractmethod
    def whole(self) -> Segment:
        """Return all of it, to be written to as its ps does, for as long as this object lives."""


def reach(name: str, layout: SegmentLayout) -> Reached:
    """Return the segment of this name, which should have this layout.

    Raises:
        SegmentError: it is not on this host, may not be opened, or is another shard's.
    """
    if not name:
        raise SegmentError("the ps does not share its memory")
    if name.startswith(_INSIDE):
        return _Inside(name, layout)
    return _Mapping(Path(name), layout)


class _Mapping(Reached):
    """A segment of another process, or reached as if it were."""

    lane = "shm"

    def __init__(self, path: Path, layout: SegmentLayout) -> None:
        self._path, self._layout = path, layout
        try:
            self._descriptor = open_file(path, os.O_RDWR | os.O_NOFOLLOW)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise SegmentError(f"{path} cannot be opened: {reason}") from error
        weakref.finalize(self, os.close, self._descriptor)
        magic, version, slots, nonce, size = _fixed(self._descriptor)
        if magic != MAGIC or version != LAYOUT_VERSION:
            raise SegmentError(f"{path} is not a segment of layout version {LAYOUT_VERSION}")
        _check_layout(str(path), layout, size, slots)
        self._check_end(layout.gradients_at)
        super().__init__(Segment(layout, path, self._descriptor, nonce.hex(), writable=False))

    def gradient(self, number: int) -> Flat:
        if number < 0:
            raise SegmentError(f"{self._path} has no gradient {number}")
        at, layout = self._layout.gradient_at(number), self._layout
        self._check_end(at + layout.gradient_stride)
        memory = _map(self._descriptor, layout.gradient_stride, at)
        try:
            lock = locks.hold(self._path, self._descriptor, at)
        except OSError as error:
            raise SegmentError(f"gradient {number} is held by another process") from error
        weakref.finalize(memory, locks.release, lock)
        return _flat(memory, 0, layout.size)

    def whole(self) -> Segment:
        return Segment(self._layout, self._path, self._descriptor, self.nonce)

    def _check_end(self, nbytes: int) -> None:
        """Check that the file has so many bytes: access beyond its end would kill the process."""
        held = os.fstat(self._descriptor).st_size
        if held < nbytes:
            raise SegmentError(f"{self._path} ends at {held} B, expected {nbytes} B or more")


class _Inside(Reached):
    """A private segment of this very process."""

    lane = "memory"

    def __init__(self, name: str, layout: SegmentLayout) -> None:
        segment = _private.get(name)
        if segment is None:
            raise SegmentError("the ps has its parameters in memory of its own process")
        _check_layout("that segment", layout, segment.layout.size, len(segment.layout.slots))
        self._segment = segment
        super().__init__(segment)

    def gradient(self, number: int) -> Flat:
        if self._segment.holders.setdefault(number, self) is not self:
            raise SegmentError(f"gradient {number} is held by another task")
        return self._segment.gradient(number)

    def whole(self) -> Segment:
        return self._segment


def _map(descriptor: int | None, nbytes: int, at: int = 0, *, writable: bool = True) -> mmap.mmap:
    if descriptor is None:
        return mmap.mmap(-1, nbytes)
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    return mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED, access, offset=at)


def _flat(memory: mmap.mmap, at: int, size: int) -> Flat:
    return np.frombuffer(memory, np.float32, size, at)


def _absent(memory: mmap.mmap, at: int, variables: int) -> NDArray[np.uint8]:
    return np.frombuffer(memory, np.uint8, 1 + variables, at)


def _check_layout(name: str, layout: SegmentLayout, size: int, slots: int) -> None:
    if (size, slots) != (layout.size, len(layout.slots)):
        raise SegmentError(
            f"{name} is of {size} elements with {slots} slots, expected {layout.size} with "
            f"{len(layout.slots)}: it is another shard's"
        )


def _fixed(descriptor: int) -> tuple[bytes, int, int, bytes, int]:
    """Return the fields at the beginning of an open file, zeros if it is none or shorter."""
    is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
    head = os.pread(descriptor, FIXED.size, 0) if is_file else b""
    magic, version, slots, nonce, size = FIXED.unpack(head.ljust(FIXED.size, b"\0"))
    return magic, version, slots, nonce, size


def reserve(descriptor: int, at: int, nbytes: int, path: Path) -> None:
    """Allocate the memory now: without room later, the kernel would kill the process."""
    try:
        os.posix_fallocate(descriptor, at, nbytes)
    except OSError as error:
        raise SegmentError(
            f"{path.parent} has no room for {data_size(nbytes)} more: {error.strerror}; see what "
            "zmqtrain clean can remove, or give it a larger one: --segment-dir, or in Docker "
            "--shm-size"
        ) from error
