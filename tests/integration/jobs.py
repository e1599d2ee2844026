"""Small jobs for tests of whole runs. A job file of such a test begins with this text."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zmqtrain import Job
from zmqtrain.data import Arrays, Digits
from zmqtrain.models import MLP
from zmqtrain.models.base import Batch, Gradients, Model, Parameters
from zmqtrain.optim import SGD, Adam

SLOW_S = 0.05  # long enough for a worker to compute in a thread, beside its heartbeats


@dataclass(frozen=True)
class Gated:
    """A model that is slow until the file ``gate`` is there."""

    model: Model
    gate: str

    def parameters(self, seed: int) -> dict[str, Any]:
        return self.model.parameters(seed)

    def loss_and_gradients(self, parameters: Parameters, batch: Batch, out: Gradients) -> float:
        if not Path(self.gate).exists():
            time.sleep(SLOW_S)
        return self.model.loss_and_gradients(parameters, batch, out)

    def metrics(self, parameters: Parameters, batch: Batch) -> dict[str, float]:
        return self.model.metrics(parameters, batch)


@dataclass(frozen=True)
class Counting:
    """With SGD at rate 1, parameter i counts how often example i was learned from."""

    examples: int

    def parameters(self, seed: int) -> dict[str, Any]:
        return {"counts": np.zeros(self.examples, np.float32)}

    def loss_and_gradients(self, parameters: Parameters, batch: Batch, out: Gradients) -> float:
        (indices,) = batch
        out["counts"][...] = -np.bincount(indices, minlength=self.examples)
        return 0.0

    def metrics(self, parameters: Parameters, batch: Batch) -> dict[str, float]:
        return {"loss": 0.0}


def digits_job(gate: str | None = None, **fields: Any) -> Job:
    """Return a job that learns real digits well within 300 steps of two workers."""
    model: Model = MLP(features=64, hidden=32, classes=10)
    defaults = {"batch_size": 50, "steps": 300, "partition_nbytes": 2048}
    return Job(
        model=model if gate is None else Gated(model, gate),
        data=Digits(),
        optimizer=Adam(learning_rate=0.005),
        **defaults | fields,
    )


def counting_job(
    gate: str | None = None, examples: int = 100, aggregate: int = 1, **fields: Any
) -> Job:
    """Return a job whose parameters count examples if ``aggregate`` gradients make an update."""
    model: Model = Counting(examples)
    indices = np.arange(examples)
    defaults = {"batch_size": 7, "steps": 300, "partition_nbytes": 64}
    return Job(
        model=model if gate is None else Gated(model, gate),
        data=Arrays((indices,), (indices,)),
        optimizer=SGD(learning_rate=float(aggregate)),
        **defaults | fields,
    )
