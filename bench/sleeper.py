"""A job whose gradients take as long as they are told to, on machines with few cores, too."""

from __future__ import annotations

import time
from random import Random
from typing import Any

import numpy as np

from bench.forecast import Cluster
from bench.jobs import dataless_job
from zmqtrain import Job
from zmqtrain.models.base import Batch, Gradients, Parameters
from zmqtrain.optim import SGD


class Sleeper:
    """A small model that sleeps before it gives its gradient.

    Workers share it, so none of them is slow for good: only pauses are possible.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._random = Random(cluster.seed)

    def __repr__(self) -> str:
        return "Sleeper()"

    def parameters(self, seed: int) -> dict[str, Any]:
        return {"w": np.zeros(8, np.float32)}

    def loss_and_gradients(self, parameters: Parameters, batch: Batch, out: Gradients) -> float:
        time.sleep(self._cluster.compute_s(self._random))
        out["w"][...] = 1
        return 0.0

    def metrics(self, parameters: Parameters, batch: Batch) -> dict[str, float]:
        return {}


def make_job(policy: str, steps: int, cluster: Cluster) -> Job:
    """Return a job of so many global steps whose gradients take as long as the cluster's."""
    return dataless_job(Sleeper(cluster), steps, optimizer=SGD(0.01), policy=policy)
