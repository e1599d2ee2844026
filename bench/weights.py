"""A job whose model is one variable of a given size, and holds no memory beside it.

Every task loads the job, so what the model holds would count for the memory of a ps.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.jobs import RULES, dataless_job
from bench.workload import items_of
from zmqtrain import Job


class Weights:
    """One variable; every byte of it, and of its gradient, is written."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __repr__(self) -> str:
        return f"Weights({self.size})"

    def parameters(self, seed: int) -> dict[str, Any]:
        return {"weights": np.full(self.size, 0.5, np.float32)}

    def loss_and_gradients(self, parameters: Any, batch: Any, out: Any) -> float:
        out["weights"].fill(1e-3)
        return 0.0

    def metrics(self, parameters: Any, batch: Any) -> dict[str, float]:
        return {"loss": 0.0}


def make_job(megabytes: float, steps: int, rule: str) -> Job:
    """Return the job with ``megabytes`` of parameters."""
    return dataless_job(Weights(items_of(megabytes)), steps, optimizer=RULES[rule], prefetch=0)
