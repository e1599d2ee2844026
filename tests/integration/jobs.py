"""Small jobs for tests of whole runs. A job file of such a test begins with this text."""

from __future__ import annotations

import itertools
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zmqtrain import Job
from zmqtrain.data import Arrays, Digits
from zmqtrain.models import MLP, written
from zmqtrain.models.base import Batch, Gradients, Model, Parameters, as_model
from zmqtrain.models.tables import Table, Uniform
from zmqtrain.optim import SGD, Adam

SLOW_S = 0.05  # long enough for a worker to compute in a thread, beside its heartbeats
_slow_steps = itertools.count()


def pass_gate(gate: str) -> None:
    """Be slow until the file ``gate`` is there.

    Each twentieth step takes twice as long: no job ends before, however slow the rest of a test is.
    """
    for _ in range(int(2 ** (next(_slow_steps) / 20))):
        if Path(gate).exists():
            return
        time.sleep(SLOW_S)


@dataclass(frozen=True)
class Gated:
    """A model that is slow until the file ``gate`` is there."""

    model: Model
    gate: str

    def parameters(self, seed: int) -> dict[str, Any]:
        return self.model.parameters(seed)

    def loss_and_gradients(self, parameters: Parameters, batch: Batch, out: Gradients) -> float:
        pass_gate(self.gate)
        return self.model.loss_and_gradients(parameters, batch, out)

    def metrics(self, parameters: Parameters, batch: Batch) -> dict[str, float]:
        return self.model.metrics(parameters, batch)

    def tables(self, seed: int) -> dict[str, Table]:
        return as_model(self.model).tables(seed)


@dataclass(frozen=True)
class Counting:
    """With SGD at rate 1, parameter i counts how often example i was learned from.

    So does row i, if there are ``rows``.
    """

    examples: int
    rows: bool = False

    def tables(self, seed: int) -> dict[str, Table]:
        return {"rows": Table(dim=1, initial=Uniform(0.0))} if self.rows else {}

    def parameters(self, seed: int) -> dict[str, Any]:
        return {"counts": np.zeros(self.examples, np.float32)}

    def loss_and_gradients(self, parameters: Parameters, batch: Batch, out: Gradients) -> float:
        (indices,) = batch
        out["counts"][...] = -np.bincount(indices, minlength=self.examples)
        if self.rows:
            parameters["rows"].take(indices)
            out["rows"].add(indices, np.full((len(indices), 1), -1, np.float32))
        return 0.0

    def metrics(self, parameters: Parameters, batch: Batch) -> dict[str, float]:
        return {"loss": 0.0}


@dataclass(frozen=True)
class Level:
    """Raises if it is given parameters of two versions, or if another task uses its gradient.

    With SGD at rate 1, every element of ``level`` is the version. ``weights`` depend on every
    rounding.
    """

    size: int
    gate: str | None

    def parameters(self, seed: int) -> dict[str, Any]:
        weights = np.random.default_rng(seed).normal(size=500).astype(np.float32)
        return {"level": np.zeros(self.size, np.float32), "weights": weights}

    def loss_and_gradients(self, parameters: Parameters, batch: Batch, out: Gradients) -> float:
        level, gradient, (rows,) = parameters["level"], out["level"], batch
        version, mark = float(level[0]), os.getpid()
        self._check(level, version, "a parameter at its start")
        gradient[...] = mark
        out["weights"][...] = parameters["weights"] * rows.mean() - 0.1
        written(out, "weights")
        if self.gate is not None:
            pass_gate(self.gate)
        self._check(gradient, mark, "a gradient that is being computed")
        self._check(level, version, "a parameter at its end")
        gradient[...] = -1
        return 0.0

    def metrics(self, parameters: Parameters, batch: Batch) -> dict[str, float]:
        self._check(parameters["level"], float(parameters["level"][0]), "evaluated parameters")
        return {"loss": 0.0}

    def _check(self, values: Any, expected: float, where: str) -> None:
        other = values[values != expected]
        if len(other):
            raise RuntimeError(f"{where}: {len(other)} elements are not {expected}: {other[:5]}")


@dataclass(frozen=True)
class Unending:
    """A model that takes hours to evaluate; the file ``begun`` tells that it is at it."""

    begun: str

    def parameters(self, seed: int) -> dict[str, Any]:
        return {"w": np.zeros(1, np.float32)}

    def loss_and_gradients(self, parameters: Parameters, batch: Batch, out: Gradients) -> float:
        out["w"][...] = 0.0
        return 0.0

    def metrics(self, parameters: Parameters, batch: Batch) -> dict[str, float]:
        Path(self.begun).touch()
        time.sleep(1.0)
        return {"loss": 0.0}


def unending_job(begun: str, **fields: Any) -> Job:
    """Return a job of two steps that is never done with its evaluation."""
    rows = np.zeros((10**6, 0), np.float32)
    defaults = {"batch_size": 7, "steps": 2, "optimizer": SGD()}
    return Job(model=Unending(begun), data=Arrays((rows,), (rows,)), **defaults | fields)


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
    gate: str | None = None,
    examples: int = 100,
    aggregate: int = 1,
    rows: bool = False,
    **fields: Any,
) -> Job:
    """Return a job whose parameters count examples if ``aggregate`` gradients make an update."""
    model: Model = Counting(examples, rows)
    indices = np.arange(examples)
    defaults = {"batch_size": 7, "steps": 300, "partition_nbytes": 64}
    return Job(
        model=model if gate is None else Gated(model, gate),
        data=Arrays((indices,), (indices,)),
        optimizer=SGD(learning_rate=float(aggregate)),
        **defaults | fields,
    )


def level_job(gate: str | None = None, size: int = 1_200_000, **fields: Any) -> Job:
    """Return a job of 4.8 MB that fails when a read is torn; each of its updates adds 1."""
    rows = np.random.default_rng(0).normal(size=(97, 3)).astype(np.float32)
    defaults = {"batch_size": 7, "steps": 20}
    return Job(
        model=Level(size, gate),
        data=Arrays((rows,), (rows,)),
        optimizer=SGD(learning_rate=1.0),
        **defaults | fields,
    )
