"""A model of how CUDA copies and orders, as unkind as CUDA may be.

*Host memory.* A registration is of physical pages: it holds them by a second mapping. A copy from
or to registered memory goes by that mapping, so if the memory was freed and its addresses have new
pages, the copy is of the old ones, as on a device. Pages are registered as a whole; a copy of which
only a part lies on registered pages fails.

*Streams.* A copy between host and device reads and writes only when somebody waits for it; until
then what it will write is poisoned. Kernels run when they are launched. So that this hides nothing,
each stream knows what is complete before its next operation (vector clocks, as in race detectors):
an operation that touches memory whose last use it does not know to be complete is a fault. So is
the source of a copy that changes before the host has waited for the copy.

*Errors.* What a kernel does wrong is raised by a later call, and by each one after it.

A fault is noted, and the test that made it fails when the stand-in is put away.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

INVALID_VALUE, OUT_OF_MEMORY, ALREADY_REGISTERED, NOT_REGISTERED = 1, 2, 712, 713
NOT_READY, ILLEGAL_ADDRESS, NOT_SUPPORTED = 600, 700, 801
POISON = 0xFF
"""Each byte of memory that holds nothing yet: floats are NaN."""

READ_ONLY = 8
_SHARED, _PRIVATE_ANONYMOUS, _FIXED, _MAY_MOVE = 0x1, 0x22, 0x10, 0x1
_READ_WRITE = 0x3
_PAGE = mmap.PAGESIZE


class CUDARuntimeError(RuntimeError):
    """Error of CuPy's runtime module."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(f"cudaError {status}")


@dataclass
class _Registration:
    """Pages of the host, and where they are mapped a second time."""

    start: int
    nbytes: int
    alias: int
    file: int | None  # that holds pages which were private, None if they were not
    in_flight: set[tuple[Stream, int]] = field(default_factory=set)

    @property
    def stop(self) -> int:
        return self.start + self.nbytes


class HostMemory:
    """Ranges of this process's memory that are registered with CUDA."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._is_closed = False
        self.found: dict[int, _Registration] = {}

    def register(self, address: int, nbytes: int, flags: int) -> None:
        """Stand in for cudaHostRegister."""
        model = self._model
        model.raise_late_errors()
        if nbytes <= 0 or not address:
            raise CUDARuntimeError(INVALID_VALUE)
        start = address // _PAGE * _PAGE
        nbytes = -(-(address + nbytes) // _PAGE) * _PAGE - start
        if model.refuses_registration:
            raise CUDARuntimeError(OUT_OF_MEMORY)
        if any(self.touching(start, nbytes)):
            model.note("memory is registered twice", unless=model.foreign_is_there)
            raise CUDARuntimeError(ALREADY_REGISTERED)
        if flags & READ_ONLY and not model.registers_read_only:
            raise CUDARuntimeError(NOT_SUPPORTED)
        if not flags & READ_ONLY and not _is_writable(start):
            raise CUDARuntimeError(INVALID_VALUE)
        self.found[start] = _Registration(start, nbytes, *_second_mapping(start, nbytes))

    def unregister(self, address: int) -> None:
        """Stand in for cudaHostUnregister."""
        if self._is_closed:  # the array has outlived the stand-in
            return
        registration = self.found.pop(address // _PAGE * _PAGE, None)
        if registration is None:
            self._model.note("memory is unregistered that is not registered")
            raise CUDARuntimeError(NOT_REGISTERED)
        for stream, number in list(registration.in_flight):
            self._model.note("memory is unregistered while a copy is in flight")
            stream.complete(number)
        _free(registration)

    def touching(self, start: int, nbytes: int) -> Iterable[_Registration]:
        return (r for r in self.found.values() if start < r.stop and r.start < start + nbytes)

    def reached(self, address: int, nbytes: int) -> tuple[Any, _Registration | None]:
        """Return the bytes that a copy from or to an address reaches, and by which registration."""
        for found in self.touching(address, nbytes):
            if not found.start <= address < address + nbytes <= found.stop:
                raise CUDARuntimeError(INVALID_VALUE)
            return bytes_at(found.alias + address - found.start, nbytes), found
        return bytes_at(address, nbytes), None

    def close(self) -> None:
        self._is_closed = True
        for registration in self.found.values():
            _free(registration)
        self.found.clear()


def bytes_at(address: int, nbytes: int) -> Any:
    return np.ctypeslib.as_array((ctypes.c_ubyte * nbytes).from_address(address))


_libc = ctypes.CDLL(None, use_errno=True)
for _call in (getattr(_libc, name, None) for name in ("mmap", "mremap")):
    if _call is not None:
        _call.restype = ctypes.c_size_t
_FAILED = ctypes.c_size_t(-1).value


def _mapped(address: int, nbytes: int, access: int, flags: int, file: int) -> int:
    arguments = ctypes.c_size_t(address), ctypes.c_size_t(nbytes), access, flags, file
    found: int = _libc.mmap(*arguments, ctypes.c_long(0))
    assert found != _FAILED, os.strerror(ctypes.get_errno())
    return found


def _second_mapping(start: int, nbytes: int) -> tuple[int, int | None]:
    """Map pages a second time; private ones become a file's first, with the same bytes."""
    arguments = ctypes.c_size_t(start), ctypes.c_size_t(0), ctypes.c_size_t(nbytes), _MAY_MOVE
    found = _libc.mremap(*arguments)  # of nothing, to another place: a copy of a shared mapping
    if found != _FAILED:
        return found, None
    file = os.memfd_create("registered")
    os.ftruncate(file, nbytes)
    alias = _mapped(0, nbytes, _READ_WRITE, _SHARED, file)
    ctypes.memmove(alias, start, nbytes)
    _mapped(start, nbytes, _READ_WRITE, _SHARED | _FIXED, file)
    return alias, file


def _free(registration: _Registration) -> None:
    """Make pages private again if they are still mapped where they were; unmap the others."""
    start, nbytes, file = registration.start, registration.nbytes, registration.file
    if file is not None:
        inode = str(os.fstat(file).st_ino)
        ours = [line for line in _mappings() if line[0] < registration.stop and start < line[1]]
        if all(line[3] == inode for line in ours) and ours:
            _mapped(start, nbytes, _READ_WRITE, _PRIVATE_ANONYMOUS | _FIXED, -1)
            ctypes.memmove(start, registration.alias, nbytes)
        os.close(file)
    _libc.munmap(ctypes.c_size_t(registration.alias), ctypes.c_size_t(nbytes))


def _mappings() -> Iterable[tuple[int, int, str, str]]:
    """Yield start, stop, access and inode of all mappings of this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, access, _, _, inode, *_ = line.split()
        start, stop = (int(bound, 16) for bound in bounds.split("-"))
        yield start, stop, access, inode


def _is_writable(address: int) -> bool:
    return any("w" in access for start, stop, access, _ in _mappings() if start <= address < stop)


@dataclass
class Block:
    """Memory of a device, and its uses: (first byte, end, stream, number, whether it writes)."""

    memory: Any
    uses: list[tuple[int, int, Stream, int, bool]] = field(default_factory=list)


@dataclass
class Span:
    """Bytes of a block that an operation uses."""

    block: Block
    start: int
    stop: int
    is_written: bool


class Event:
    """A point in a stream."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.number, self.seen = stream, stream.number, dict(stream.seen)

    def synchronize(self) -> None:
        with self.stream.model.lock:
            self.stream.model.raise_late_errors()
            self.stream.complete(self.number)
            self.stream.model.host_waited(self)


class Stream:
    """Operations in the order of their launch; what is lazy runs when somebody waits for it."""

    by_address: ClassVar[weakref.WeakValueDictionary[int, Stream]] = weakref.WeakValueDictionary()

    def __init__(self, model: Model, device: int) -> None:
        self.model, self.device = model, device
        self.ptr = id(self)
        self.by_address[self.ptr] = self
        self.number = 0  # of the last operation
        self.seen: dict[Stream, int] = {}  # operations of others that are complete before the next
        self.hangs = False
        self._polls = 0
        self._queue: list[tuple[int, Callable[[], None]]] = []

    def record(self, event: Event | None = None) -> Event:
        with self.model.lock:
            self.model.raise_late_errors()
            return Event(self)

    def wait_event(self, event: Event) -> None:
        with self.model.lock:
            self._queue.append((self.number + 1, lambda: event.stream.complete(event.number)))
            _join(self.seen, event)

    def synchronize(self) -> None:
        self.record().synchronize()

    def query(self) -> int:
        """Stand in for cudaStreamQuery: two of three queries find the stream unfinished."""
        self._polls += 1
        if self.model.late_error:
            return self.model.late_error
        if self.hangs or self._polls % 3:
            return NOT_READY
        self.synchronize()
        return 0

    def launch(self, run: Callable[[], None], spans: Iterable[Span], *, lazily: bool) -> int:
        """Append an operation that uses these parts of the device's memory; return its number."""
        with self.model.lock:
            for stream, number in self.model.host_seen.items():
                self.seen[stream] = max(self.seen.get(stream, 0), number)
            self.number += 1
            for span in spans:
                self._use(span)
            self._queue.append((self.number, run))
            if not lazily:
                self.complete(self.number)
            return self.number

    def complete(self, number: int) -> None:
        """Run what was launched, up to an operation."""
        with self.model.lock:
            if self.hangs:
                raise AssertionError("this would wait for ever")
            while self._queue and self._queue[0][0] <= number:
                self._queue.pop(0)[1]()

    def _use(self, span: Span) -> None:
        uses = span.block.uses
        for start, stop, stream, number, is_written in uses:
            if start < span.stop and span.start < stop and (is_written or span.is_written):
                if stream is not self and self.seen.get(stream, 0) < number:
                    self.model.note("two streams use the same memory without waiting")
        if span.is_written:
            uses[:] = [u for u in uses if u[0] < span.start or span.stop < u[1]]
        else:
            uses[:] = [
                u for u in uses if u[4] or (u[0], u[1], u[2]) != (span.start, span.stop, self)
            ]
        uses.append((span.start, span.stop, self, self.number, span.is_written))


def _join(seen: dict[Stream, int], event: Event) -> None:
    for stream, number in {**event.seen, event.stream: event.number}.items():
        seen[stream] = max(seen.get(stream, 0), event.seen.get(stream, 0), number)


class Model:
    """A host with devices."""

    def __init__(self, devices: int) -> None:
        self.devices = devices
        self.lock = threading.RLock()
        self.memory = HostMemory(self)
        self.host_seen: dict[Stream, int] = {}  # what the host knows to be complete
        self.faults: list[str] = []
        self.late_error = 0  # its status, once a kernel has failed
        self.refuses_registration = False
        self.registers_read_only = False
        self.foreign_is_there = False  # other code has registered memory
        self.is_shared = False  # others read and write the host's arrays meanwhile, as in Hogwild
        self.pinned_nbytes = 1 << 40  # that can be allocated
        self._sources: list[tuple[Stream, int, Any, bytes]] = []  # of copies in flight
        self._pinned: dict[int, list[Any]] = {}  # free memory by size
        self.defaults = [Stream(self, number) for number in range(devices)]

    def note(self, fault: str, *, unless: bool = False) -> None:
        if not unless:
            self.faults.append(fault)

    def raise_late_errors(self) -> None:
        if self.late_error:
            raise CUDARuntimeError(self.late_error)

    def host_waited(self, event: Event) -> None:
        """The host knows that all before an event is complete."""
        _join(self.host_seen, event)
        self._check_sources(lambda stream, number, _: self.host_seen.get(stream, 0) >= number)

    def _check_sources(self, is_complete: Callable[[Stream, int, Any], bool]) -> None:
        """Check that the sources of copies that are complete have not changed meanwhile."""
        for copy in list(self._sources):
            stream, number, source, before = copy
            if is_complete(stream, number, source):
                stream.complete(number)
                self._sources.remove(copy)
                if source.tobytes() != before and not self.is_shared:
                    self.note("the source of a copy has changed while it was in flight")

    def to_device(self, source: Any, target: Any, span: Span, stream: Stream) -> None:
        """Copy bytes; ``source``: an array of the host, ``target``: of the device's memory."""
        reached, registration = self.memory.reached(source.ctypes.data, source.nbytes)
        target[...] = POISON
        number = self._copy(reached, target, span, stream, registration)
        self._sources.append((stream, number, source, source.tobytes()))

    def to_host(self, source: Any, target: Any, span: Span, stream: Stream) -> None:
        """Copy bytes; ``source``: of the device's memory, ``target``: an array of the host."""
        reached, registration = self.memory.reached(target.ctypes.data, target.nbytes)
        # A copy from there that the stream knows to be complete may be written over.
        self._check_sources(
            lambda other, number, source: (
                np.may_share_memory(source, target)
                and (other is stream or stream.seen.get(other, 0) >= number)
            )
        )
        if not self.is_shared:
            reached[...] = POISON
        self._copy(source, reached, span, stream, registration)

    def _copy(
        self, source: Any, target: Any, span: Span, stream: Stream, by: _Registration | None
    ) -> int:
        key: tuple[Stream, int] | None = None

        def run() -> None:
            target[...] = source
            if by is not None and key is not None:
                by.in_flight.discard(key)

        number = stream.launch(run, [span], lazily=True)
        if by is not None:
            key = stream, number
            by.in_flight.add(key)
        return number

    def alloc_pinned(self, nbytes: int) -> Any:
        """Return pinned memory; as in CuPy's pool, unreferenced memory is reused at once."""
        self.raise_late_errors()
        free = self._pinned.setdefault(nbytes, [])
        if free:
            memory = free.pop()
        elif nbytes <= self.pinned_nbytes:
            self.pinned_nbytes -= nbytes
            memory = mmap.mmap(-1, max(nbytes, 1))
        else:
            raise CUDARuntimeError(OUT_OF_MEMORY)
        given = (ctypes.c_byte * nbytes).from_buffer(memory)
        weakref.finalize(given, free.append, memory).atexit = False
        return given

    def close(self) -> None:
        self.memory.close()
        assert not self.faults, sorted(set(self.faults))
