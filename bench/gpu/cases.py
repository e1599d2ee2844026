"""Cases and medians on a device, for all parts of `bench gpu`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from zmqtrain.compute.device import load_cupy

Case = tuple[Mapping[str, Any], Callable[[], Mapping[str, Any]]]
"""What tells a row from the others, and what measures the rest of it."""

WARM_UP = 3  # rounds not counted: kernels are compiled, clocks rise
LEAST, MOST = 5, 200  # rounds that are counted
SECONDS = 0.5  # that the counted rounds take, unless they are the least
TORCH_DEVICES = {"cpu": "cpu", "gpu": "cuda"}


def text_of(error: Exception) -> str:
    """Return the kind and the first line of an error."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def arrays_on(device: str) -> tuple[Any, Callable[[], object]]:
    """Return CuPy or NumPy, and what waits for the device.

    Raises:
        ConfigError: the device is gpu, and CuPy is not installed or finds none.
    """
    if device == "cpu":
        return np, lambda: None
    cupy = load_cupy("--device gpu")
    return cupy, cupy.cuda.Device(0).synchronize


def medians_s(steps: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Return the median time of each step in seconds. They take turns, and wait for the device."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    rounds, until = 0, 0.0
    while rounds < WARM_UP + LEAST or (rounds < WARM_UP + MOST and time.perf_counter() < until):
        if rounds == WARM_UP:
            until = time.perf_counter() + SECONDS
        rounds += 1
        for name, step in steps.items():
            began_at = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - began_at)
    return {name: statistics.median(each[WARM_UP:]) for name, each in times.items()}
