"""A job that only moves bytes: one variable of a given size, and a gradient that costs nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.jobs import RULES, dataless_job
from bench.workload import items_of
from zmqtrain import Job


class Blob:
    """Parameters of so many megabytes, moved in a mode of `bench.workload`.

    Remembers when each step began, and calls ``on_step`` with its number.
    """

    def __init__(self, megabytes: float, mode: str) -> None:
        self.size = items_of(megabytes)
        self.mode = mode
        self.began_at: list[float] = []
        self.on_step: Callable[[int], None] = lambda step: None
        self._source: Any = None  # beside the parameters and gradients, wherever these lie
        self._sink: Any = None

    def __repr__(self) -> str:
        return f"Blob({self.size})"

    def parameters(self, seed: int) -> dict[str, Any]:
        return {"blob": np.zeros(self.size, np.float32)}

    def loss_and_gradients(self, parameters: Any, batch: Any, out: Any) -> float:
        self.began_at.append(time.perf_counter())
        self.on_step(len(self.began_at))
        if self._sink is None:
            self._source = np.full_like(out["blob"], 1e-3)
            self._sink = np.empty_like(parameters["blob"])
        if self.mode == "touched" or len(self.began_at) == 1:
            self._sink[...] = parameters["blob"]
            out["blob"][...] = self._source
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
