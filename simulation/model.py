"""A job whose parameters show the counted examples: a sum for each on every shard.

An example that is one of k gradients of an update adds 1/k to its element of a shard's sums.
Another part depends on every earlier update, to the last bit; odd examples have no gradient of it.
State has a mean and the number of steps.

With tables, an example has a row, in which it is counted as in the sums of the shard that has the
row, and an element that depends on all updates of it. The same elements are in dense twins.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zmqtrain.callbacks import Callback
from zmqtrain.callbacks.base import Logs
from zmqtrain.data.arrays import ArrayDataset
from zmqtrain.job import Job
from zmqtrain.models.base import Batch, Gradients, Parameters, absent, written
from zmqtrain.models.tables import Ids, Table, Uniform
from zmqtrain.optim import SGD, Muon

EXAMPLES = 512
EVALUATED = 20  # examples, in five parts
TRAIL = (2, 2)  # the shape of the part that depends on all updates

_NOISE = np.random.Generator(np.random.PCG64(0)).uniform(-1, 1, (EXAMPLES, *TRAIL))
_NOISE = _NOISE.astype(np.float32)


class CountingModel:
    """The model. Its examples are their own numbers; those in ``bad`` have no gradient."""

    def __init__(
        self, shards: int, bad: frozenset[int] = frozenset(), *, has_tables: bool = False
    ) -> None:
        self.shards = shards
        self.bad = bad
        self.has_tables = has_tables

    def __repr__(self) -> str:
        return f"CountingModel({self.shards}, {sorted(self.bad)})"

    def parameters(self, seed: int) -> dict[str, Any]:
        sums = {f"sums{i}": np.zeros(EXAMPLES, np.float32) for i in range(self.shards)}
        trails = {f"trail{i}": np.ones(TRAIL, np.float32) for i in range(self.shards)}
        twins = {f"twins{i}": np.zeros(EXAMPLES, np.float32) for i in range(self.shards)}
        return {**sums, **trails, **(twins if self.has_tables else {})}

    def tables(self, seed: int) -> dict[str, Table]:
        return {"rows": Table(dim=2, initial=Uniform(0.0))} if self.has_tables else {}

    def state(self, seed: int) -> dict[str, Any]:
        means = {f"mean{i}": np.zeros(TRAIL, np.float32) for i in range(self.shards)}
        steps = {f"steps{i}": np.zeros((), np.int64) for i in range(self.shards)}
        return {**means, **steps}

    def look_ahead(self, batch: Batch) -> dict[str, Ids]:
        return {"rows": np.array([batch[0][0]])} if self.has_tables else {}

    def loss_and_gradients(self, parameters: Parameters, batch: Batch, out: Gradients) -> float:
        example = int(batch[0][0])
        for name, gradient in out.items():
            if name.startswith("sums"):
                gradient[...] = 0
                gradient[example] = -1
            elif name.startswith("twins"):
                gradient[...] = 0
                gradient[example] = _next(parameters[name][example], example)
            elif name == "rows":
                (row,) = parameters[name].take([example])
                gradient.add([example], [[-1, _next(row[1], example)]])
            elif name.startswith("steps"):
                gradient[...] = parameters[name] + 1
            else:
                np.multiply(parameters[name], np.float32(0.3), out=gradient)
                gradient += _NOISE[example]
            if name != "rows":
                written(out, name)
        if example % 2:  # not zero, so that an update of a trail without a gradient would show
            absent(out, *(f"trail{i}" for i in range(self.shards)))
        return float("nan") if example in self.bad else 1.0

    def metrics(self, parameters: Parameters, batch: Batch) -> dict[str, float]:
        sums = [float(parameters[f"sums{i}"].sum()) for i in range(self.shards)]
        updates = {"fewest_updates": min(sums), "most_updates": max(sums)}
        if "rows" in parameters:
            rows = parameters["rows"].take(np.arange(EXAMPLES))
            updates["updates_of_rows"] = float(rows[:, 0].sum())
        return {"loss": float(np.mean(parameters["trail0"]))} | updates


def _next(value: Any, example: int) -> Any:
    """Return the gradient of an element that depends on all of its updates."""
    return np.float32(value) * np.float32(0.3) + _NOISE[example, 0, 0]


class Numbers:
    """The data: the numbers below ``count``."""

    def __init__(self, count: int = EXAMPLES) -> None:
        self.count = count

    def load(self, directory: str | None) -> tuple[ArrayDataset, ArrayDataset]:
        return ArrayDataset(np.arange(self.count)), ArrayDataset(np.arange(EVALUATED))

    def __repr__(self) -> str:
        return "Numbers()"


class SameAgain(Callback):
    """Sets weights and learning rate to their own values after each epoch."""

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        self.model.set_weights(self.model.get_weights())
        self.model.optimizer.changed = True


def counting_job(
    shards: int,
    bad: frozenset[int],
    *,
    examples: int = EXAMPLES,
    tables: bool = False,
    matrices: bool = False,
    **fields: Any,
) -> Job:
    """Return a job in which every shard holds sums and one trail, a matrix to Muon if wanted."""
    return Job(
        model=CountingModel(shards, bad, has_tables=tables),
        data=Numbers(examples),
        optimizer=fields.pop("optimizer", SGD(1.0)),
        groups={"trail*": {"optimizer": Muon(1.0)}} if matrices else {},
        batch_size=1,
        placement="round-robin",
        partition_nbytes=0,
        **fields,
    )
