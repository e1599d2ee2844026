"""Speed of copies of arrays to a GPU and back."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from bench.gpu.cases import Case, arrays_on, medians_s

NBYTES = {"4 KB": 1 << 12, "1 MB": 1 << 20, "64 MB": 1 << 26}


def cases() -> Iterator[Case]:
    """Yield those of each size, kind of host memory and direction."""
    cupy, wait = arrays_on("gpu")
    for size, nbytes in NBYTES.items():
        for memory in ("pageable", "registered"):
            for direction in ("to device", "to host", "both at once"):
                keys = {"size": size, "host_memory": memory, "direction": direction}
                yield keys, partial(_between, cupy, nbytes, memory, direction)
        yield {"size": size, "direction": "within device"}, partial(_within, cupy, nbytes, wait)


def _between(cupy: Any, nbytes: int, memory: str, direction: str) -> dict[str, float]:
    # Arrays of whole pages: registered memory must share none with anything.
    source, target = (np.frombuffer(mmap.mmap(-1, nbytes), np.float32) for _ in range(2))
    registered = [array.ctypes.data for array in (source, target) if memory == "registered"]
    source[:] = np.arange(source.size) % 1000
    there, back = cupy.zeros(source.size, np.float32), cupy.asarray(source)
    to_device, to_host = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    cupy.cuda.Device().synchronize()  # these streams do not wait for what the current one fills

    def step() -> None:
        if direction != "to host":
            there.set(source, stream=to_device)
        if direction != "to device":
            back.get(stream=to_host, out=target, blocking=False)
        to_device.synchronize()
        to_host.synchronize()

    for address in registered:
        cupy.cuda.runtime.hostRegister(address, nbytes, 0)
    try:
        row = _row(nbytes * (2 if direction == "both at once" else 1), step)
    finally:
        for address in registered:
            cupy.cuda.runtime.hostUnregister(address)
    copies = {"to device": [there.get()], "to host": [target]}.get(direction, [there.get(), target])
    if not all(np.array_equal(copy, source) for copy in copies):
        raise ValueError("a copy has other values than its source")
    return row


def _within(cupy: Any, nbytes: int, wait: Callable[[], object]) -> dict[str, float]:
    """Measure in bytes that are read or written."""
    source, target = (cupy.zeros(nbytes // 4, np.float32) for _ in range(2))
    return _row(2 * nbytes, lambda: (cupy.copyto(target, source), wait()))


def _row(nbytes: int, step: Callable[[], object]) -> dict[str, float]:
    median_s = medians_s({"": step})[""]
    return {"median_us": 1e6 * median_s, "gb_per_second": nbytes / 1e9 / median_s}
