"""Fakes of the clock, of threads, of chance and of the kernel for a simulated run.

zmqtrain's modules use ``time``, ``secrets`` and ``os`` by these names, which are replaced here, so
the simulated code stays as it is. The fakes are process-wide: run nothing else beside a simulation.
"""

from __future__ import annotations

import asyncio
import fcntl
import functools
import gc
import logging
import os
import secrets
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from simulation.loop import Awaited, Process, VirtualLoop, current_process, unseen
from zmqtrain.actors import task
from zmqtrain.data import prefetch
from zmqtrain.observe.metrics import Metrics, Phases
from zmqtrain.store import segment_layout, words
from zmqtrain.store.layout import ALIGNMENT
from zmqtrain.store.logdir import LOCK_FILE
from zmqtrain.store.segment_files import SUFFIX
from zmqtrain.wire import chunks

_real_open, _real_close = os.open, os.close
_WHOLE_FILE = struct.pack("hhqqi4x", fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0)

CHUNK_SIZE = 120  # elements, of tensors in chunks
CREDITS_NBYTES = (1200, 1 << 20)  # some chunks, or all
PARTS = 4  # of a small shard: each member of a board has something to update
OF_TABLES = f"{SUFFIX}.tables/"  # in the path of a file with rows


class _AtOnce(Executor):
    """Runs work at once, instead of in a thread."""

    def __init__(self, *_: object, **__: object) -> None:
        """There are no threads to count or to name."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function(*args, **named))
        except Exception as error:
            future.set_exception(error)
        return future


@contextmanager
def faked(
    loop: VirtualLoop,
    random: Random,
    unix_s: Callable[[], float],
    *,
    in_chunks: bool,
    in_parts: bool,
) -> Iterator[None]:
    """Replace a task's clock, chance, threads and kernel by those of the simulation.

    ``unix_s``: returns the time of the wall clock. ``in_chunks``: send small tensors in chunks, as
    large ones. ``in_parts``: cut small shards into parts.
    """

    fakes: list[tuple[Any, str, Any]] = [
        (time, "monotonic", loop.time),
        (time, "perf_counter", loop.performance_counter),
        (time, "time", unix_s),
        (time, "clock_gettime_ns", lambda clock: int(1e9 * loop.time())),
        (secrets, "token_hex", lambda nbytes=32: random.randbytes(nbytes).hex()),
        (os, "open", _open),
        (os, "close", _close),
        (asyncio, "run_coroutine_threadsafe", Awaited),
        (prefetch, "ThreadPoolExecutor", _AtOnce),
        (task, "Metrics", metrics_of),
        (Phases, "totals", lambda _: ()),  # they would include earlier runs
        (words, "wait", lambda *_: None),  # a waiting process polls, and time passes
    ]
    if in_chunks:
        fakes += [
            (chunks, "CHUNK_SIZE", CHUNK_SIZE),
            (chunks, "WINDOW_NBYTES", random.choice(CREDITS_NBYTES)),
        ]
    if in_parts:
        fakes.append((segment_layout, "cut", small_parts))
    before = [(module, name, getattr(module, name)) for module, name, _ in fakes]
    for module, name, fake in fakes:
        setattr(module, name, fake)
    try:
        yield
    finally:
        for module, name, original in before:
            setattr(module, name, original)
        _owners.clear()


def small_parts(size: int) -> tuple[slice, ...]:
    """Return the parts of a shard of ``size`` elements."""
    bounds = [size * part // PARTS // ALIGNMENT * ALIGNMENT for part in range(PARTS)]
    return tuple(map(slice, bounds, [*bounds[1:], size]))


_owners: dict[int, Process] = {}
"""The owners of open descriptors of segments and of the logdir's lock."""


def _open(path: Any, *arguments: Any, **named: Any) -> int:
    descriptor = _real_open(path, *arguments, **named)
    process = current_process()
    is_kept = str(path).endswith((SUFFIX, LOCK_FILE)) or OF_TABLES in str(path)
    if process is not None and is_kept:
        _owners[descriptor] = process
    return descriptor


def _close(descriptor: int) -> None:
    _real_close(descriptor)
    _owners.pop(descriptor, None)


def _descriptors(process: Process) -> list[int]:
    return [descriptor for descriptor, owner in _owners.items() if owner is process]


@dataclass(frozen=True, slots=True)
class Kept:
    """A snapshot of a segment, or of rows: its file, open and under a second name, and its bytes,
    each part that has any by its place."""

    path: Path
    second: Path
    descriptor: int
    data: dict[int, bytes]


def memory_of(process: Process) -> list[Kept]:
    """Keep the content of a process's open segments until :func:`put_back`."""
    kept = []
    for number, descriptor in enumerate(_descriptors(process)):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        is_read = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        if path.name == LOCK_FILE or not path.exists() or is_read:
            continue  # it holds no memory, or is unlinked, or is another process's
        folder = path.parent.parent if OF_TABLES in str(path) else path.parent
        second = folder / f"{path.parent.name}-{path.name}.kept-{number}"
        os.link(path, second)
        kept.append(Kept(path, second, os.dup(descriptor), _data(descriptor)))
    return kept


def _data(descriptor: int) -> dict[int, bytes]:
    """Return the bytes of a sparse file, without its holes."""
    found, at, size = {}, 0, os.fstat(descriptor).st_size
    while at < size:
        try:
            at = os.lseek(descriptor, at, os.SEEK_DATA)
        except OSError:  # the rest is a hole
            break
        stop = os.lseek(descriptor, at, os.SEEK_HOLE)
        found[at] = os.pread(descriptor, stop - at, at)
        at = stop
    return found


def put_back(memory: list[Kept]) -> None:
    """Undo the changes of segments since :func:`memory_of`."""
    for kept in memory:
        for at, data in _data(kept.descriptor).items():
            os.pwrite(kept.descriptor, bytes(len(data)), at)
        for at, data in kept.data.items():
            os.pwrite(kept.descriptor, data, at)
        _real_close(kept.descriptor)
        kept.path.parent.mkdir(exist_ok=True)
        if kept.path.exists():
            kept.second.unlink()
        else:
            kept.second.rename(kept.path)


def unlock(process: Process) -> None:
    """Release the locks of a dead process, as the kernel does."""
    for descriptor in _descriptors(process):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _WHOLE_FILE)


class _LogHandler(logging.Handler):
    """Passes on lines of the log, each with its process."""

    def __init__(self, on_line: Callable[[str], None]) -> None:
        super().__init__()
        self._on_line = on_line

    def emit(self, record: logging.LogRecord) -> None:
        if current_process() is None:
            return
        with unseen():
            self._on_line(f"{current_process()} says: {self.format(record)}")


@contextmanager
def garbage_kept() -> Iterator[None]:
    """Collect garbage only after the block, since collections would close files at random times.

    Earlier objects are left alone.
    """
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()
        gc.unfreeze()


@contextmanager
def log_passed(on_line: Callable[[str], None] | None) -> Iterator[None]:
    """Pass the log of the tasks to ``on_line``, if given."""
    log = logging.getLogger("zmqtrain")
    before = log.level, log.propagate
    log.propagate = False
    log.setLevel(logging.INFO if on_line is not None else logging.CRITICAL + 1)
    handler = _LogHandler(on_line) if on_line is not None else logging.NullHandler()
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before[0])
        log.propagate = before[1]


def metrics_of(role: str, index: int) -> Metrics:
    """Return the metrics of a task that starts; what heartbeats report of them begins at zero."""
    metrics = _cached_metrics(role, index)
    for counter in (metrics.steps, metrics.bytes_sent, metrics.bytes_received):
        counter.reset()
    metrics.local_step.set(0)
    return metrics


@functools.cache
def _cached_metrics(role: str, index: int) -> Metrics:
    """Return metrics that are made once, since making them dominates the start of a task."""
    return Metrics(role, index)
