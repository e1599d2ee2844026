"""A job that only moves bytes: one variable of a given size, and a gradient that costs nothing."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from zmqtrain import Job
from zmqtrain.data import Arrays
from zmqtrain.optim import SGD, Adam, Rule

RULES: dict[str, Rule] = {"sgd": SGD(learning_rate=1e-6), "adam": Adam(learning_rate=1e-6)}


class Blob:
    """Parameters of so many megabytes; remembers when each step began.

    In mode ``touched`` every byte of the gradient is written and every byte of the parameters read,
    as a model would; in mode ``in_place`` they are left where they lie.
    """

    def __init__(self, megabytes: float, mode: str) -> None:
        self.size = max(1, int(megabytes * 1e6 / 4))
        self.mode = mode
        self.began_at: list[float] = []
        self._source = np.full(self.size, 1e-3, np.float32)
        self._sink = np.empty(self.size, np.float32)

    def __repr__(self) -> str:
        return f"Blob({self.size})"

    def parameters(self, seed: int) -> dict[str, Any]:
        return {"blob": np.zeros(self.size, np.float32)}

    def loss_and_gradients(self, parameters: Any, batch: Any, out: Any) -> float:
        self.began_at.append(time.perf_counter())
        if self.mode == "touched" or len(self.began_at) == 1:
            self._sink[...] = parameters["blob"]
            out["blob"][...] = self._source
        return 0.0

    def metrics(self, parameters: Any, batch: Any) -> dict[str, float]:
        return {"loss": 0.0}


def make_job(megabytes: float, steps: int, rule: str, mode: str) -> Job:
    """Return the job that moves ``megabytes`` in each direction ``steps`` times."""
    examples = np.zeros((64, 1), np.float32)
    return Job(
        model=Blob(megabytes, mode),
        data=Arrays((examples,), (examples,)),
        optimizer=RULES[rule],
        batch_size=1,
        steps=steps,
        prefetch=0,
        partition_nbytes=256 * 1024,
    )
