"""A job whose gradients take as long as they are told to, on machines with few cores, too."""

from __future__ import annotations

import time
from random import Random
from typing import Any

import numpy as np

from bench.forecast import Costs, Stragglers
from zmqtrain import Job
from zmqtrain.data import Arrays
from zmqtrain.models.base import Batch, Gradients, Parameters
from zmqtrain.optim import SGD


class Sleeper:
    """A small model that sleeps before it gives its gradient.

    Workers share it, so none of them is slow for good: only pauses are possible.
    """

    def __init__(self, costs: Costs, stragglers: Stragglers, seed: int) -> None:
        self._costs, self._stragglers = costs, stragglers
        self._random = Random(seed)

    def __repr__(self) -> str:
        return "Sleeper()"

    def parameters(self, seed: int) -> dict[str, Any]:
        return {"w": np.zeros(8, np.float32)}

    def loss_and_gradients(self, parameters: Parameters, batch: Batch, out: Gradients) -> float:
        costs, stragglers, random = self._costs, self._stragglers, self._random
        seconds = costs.compute_s * max(0.0, random.gauss(1.0, costs.spread))
        if random.random() < stragglers.chance:
            seconds += stragglers.pause_s
        time.sleep(seconds)
        out["w"][...] = 1
        return 0.0

    def metrics(self, parameters: Parameters, batch: Batch) -> dict[str, float]:
        return {}


def make_job(policy: str, steps: int, costs: Costs, stragglers: Stragglers, seed: int) -> Job:
    """Return a job of so many global steps whose gradients take what ``costs`` says."""
    examples = (np.zeros((16, 1), np.float32),)
    return Job(
        model=Sleeper(costs, stragglers, seed),
        data=Arrays(examples, examples),
        optimizer=SGD(0.01),
        policy=policy,
        batch_size=1,
        steps=steps,
    )
