"""Copies between a device and host memory that CUDA must not touch: by way of buffers of our own.

Memory that is not registered may share pages with memory that other code has registered, and a
direct copy from there fails, or copies other pages than the array's. The buffers are page-locked,
so the device copies one while the host copies the other.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import numpy as np

from zmqtrain.compute.arrays import Flat, blocks

log = logging.getLogger(__name__)

SIZE = 1 << 18  # elements of a buffer, 1 MiB: larger ones leave the host's cache


class Staging:
    """Two buffers for copies in one direction, in the order of one stream."""

    def __init__(self, cupy: Any, stream: Any) -> None:
        self._cupy, self._stream = cupy, stream
        self._buffers: list[_Buffer] = []

    def load(self, flat: Flat, twin: Any) -> None:
        """Copy to the device; on return the host's array may change."""
        for buffer, piece in self._pieces(len(flat)):
            buffer.load(flat[piece], twin[piece])

    def store(self, twin: Any, flat: Flat) -> None:
        """Copy to the host; the copy is complete after :meth:`settle`."""
        for buffer, piece in self._pieces(len(flat)):
            buffer.store(twin[piece], flat[piece])

    def settle(self) -> None:
        """Wait for all copies."""
        for buffer in self._buffers:
            buffer.settle()

    def _pieces(self, size: int) -> Iterator[tuple[_Buffer, slice]]:
        """Yield free buffers in turn, and the elements for each."""
        if not self._buffers:
            self._buffers = [_Buffer(self._cupy, self._stream) for _ in range(2)]
        for buffer, piece in zip(cycle(self._buffers), blocks(size, SIZE), strict=False):
            buffer.settle()
            yield buffer, piece


class _Buffer:
    """A buffer that is free, or that the device reads or writes."""

    def __init__(self, cupy: Any, stream: Any) -> None:
        self._stream = stream
        self._copied: Any = None  # the event after the device's copy; None: the buffer is free
        self._target: Flat | None = None  # where values from the device go
        try:
            memory = cupy.cuda.alloc_pinned_memory(4 * SIZE)
            self._values = np.frombuffer(memory, np.float32, SIZE)
        except cupy.cuda.runtime.CUDARuntimeError as error:
            log.warning("copies to and from the GPU are slower: no memory can be pinned: %s", error)
            self._values = np.empty(SIZE, np.float32)

    def load(self, source: Flat, twin: Any) -> None:
        values = self._values[: len(source)]
        np.copyto(values, source)
        twin.set(values, stream=self._stream)
        self._copied = self._stream.record()

    def store(self, twin: Any, target: Flat) -> None:
        twin.get(stream=self._stream, out=self._values[: len(target)], blocking=False)
        self._copied, self._target = self._stream.record(), target

    def settle(self) -> None:
        """Wait until the buffer is free; the target has its values then."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
        if self._target is not None:
            np.copyto(self._target, self._values[: len(self._target)])
            self._target = None
