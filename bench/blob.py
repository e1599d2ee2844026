"""A job that only moves bytes: one variable of a given size, and a gradient that costs nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from bench.jobs import RULES, dataless_job
from bench.workload import items_of
from zmqtrain import Job


class Blob:
    """Parameters of so many megabytes in all, cut into ``parts``, moved in a mode of
    `bench.workload`.

    Remembers when each step began, and calls ``on_step`` with its number.
    """

    def __init__(self, megabytes: float, mode: str, parts: int = 1) -> None:
        self.size, self.mode, self.parts = items_of(megabytes), mode, parts
        self.began_at: list[float] = []
        self.on_step: Callable[[int], object] = lambda step: None
        self._sources: dict[str, Any] = {}  # beside parameters and gradients, wherever these lie
        self._sinks: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"Blob({self.size}, {self.parts})"

    def parameters(self, seed: int) -> dict[str, Any]:
        cuts = [self.size * index // self.parts for index in range(self.parts + 1)]
        sizes = [stop - start for start, stop in pairwise(cuts)]
        return {f"part {i}": np.zeros(size, np.float32) for i, size in enumerate(sizes) if size}

    def loss_and_gradients(self, parameters: Any, batch: Any, out: Any) -> float:
        self.began_at.append(time.perf_counter())
        self.on_step(len(self.began_at))
        if not self._sinks:
            self._sources = {name: np.full_like(value, 1e-3) for name, value in out.items()}
            self._sinks = {name: np.empty_like(value) for name, value in parameters.items()}
        if self.mode == "touched" or len(self.began_at) == 1:
            for name, source in self._sources.items():
                self._sinks[name][...] = parameters[name]
                out[name][...] = source
        return 0.0

    def metrics(self, parameters: Any, batch: Any) -> dict[str, float]:
        return {"loss": 0.0}


def make_job(
    megabytes: float,
    steps: int,
    rule: str,
    mode: str = "in_place",
    **fields: str,
) -> Job:
    """Return the job that moves ``megabytes`` in each direction ``steps`` times."""
    return dataless_job(
        Blob(megabytes, mode),
        steps,
        optimizer=RULES[rule],
        prefetch=0,
        partition_nbytes=256 * 1024,
        **fields,
    )
