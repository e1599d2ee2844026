"""Batches of unlike weights, some without a gradient of a variable, and some in which nothing
counts: each way of a gradient makes the same of them, with the mean clipped or not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import zmqtrain
from tests.chunk_sizes import chunks_of
from tests.exchanges.conftest import KINDS, each_step, values
from tests.exchanges.test_clipping import CUT_UP, WAYS, clipped
from zmqtrain import Job
from zmqtrain.data import Arrays
from zmqtrain.data.batches import BatchPlan
from zmqtrain.models.base import BaseModel, absent, written
from zmqtrain.models.weights import EMPTY
from zmqtrain.optim import SGD, Adam, Lion
from zmqtrain.training.exchange import Exchange

SHAPES = {"w": (60, 7), "sometimes": (50, 3), "b": (5,)}
BATCHES, STEPS, ROWS = 24, 8, 3
RANDOM = np.random.default_rng(5)
MEANS = RANDOM.normal(size=(BATCHES, 600)).astype(np.float32)
WEIGHTS = np.where(np.arange(BATCHES) % 5 < 3, RANDOM.integers(1, 40, BATCHES), 0)
WEIGHTS[6:9] = 0  # all of a step
LACKS = np.arange(BATCHES) % 3 != 1


class Mixed(BaseModel):
    """Each row of a batch is the batch's number."""

    def parameters(self, seed: int) -> dict[str, Any]:
        return {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}

    def state(self, seed: int) -> dict[str, Any]:
        return {"mean": np.zeros(25, np.float32)}

    def weight(self, batch: Any) -> float:
        return float(WEIGHTS[batch[0][0]])

    def loss_and_gradients(self, parameters: Any, batch: Any, out: Any) -> float:
        number = batch[0][0]
        found = gradients(number, parameters)
        for name in SHAPES:
            out[name][...] = found[name]
            if not (LACKS[number] and name == "sometimes"):
                written(out, name)
        if LACKS[number]:
            absent(out, "sometimes")
        out["mean"][...] = found["mean"]
        return float(number)

    def metrics(self, parameters: Any, batch: Any) -> dict[str, float]:
        return {}


def gradients(number: int, parameters: Any) -> dict[str, Any]:
    """Return the gradients of a batch, and the new state."""
    w, sometimes, b, mean = np.split(MEANS[number], [420, 570, 575])
    return {
        "w": w.reshape(60, 7) + 0.125 * parameters["w"],
        "sometimes": sometimes.reshape(50, 3) * (not LACKS[number]),
        "b": b,
        "mean": 0.5 * parameters["mean"] + 0.5 * mean,
    }


def make_job(**fields: Any) -> Job:
    numbers = np.empty(BATCHES * ROWS, np.int64)
    plan = BatchPlan(len(numbers), ROWS, seed=0)
    for batch in range(BATCHES):
        numbers[plan.indices(batch)] = batch
    defaults = {"policy": "sync-replicas", "steps": STEPS, "batch_size": ROWS}
    return Job(model=Mixed(), data=Arrays((numbers,)), **defaults | fields)


def expected(limit: float) -> dict[str, Any]:
    """Return in float64 what steps of two gradients with Adam(0.1) make, in Keras's form."""
    at: dict[str, Any] = {name: np.ones(shape) for name, shape in SHAPES.items()}
    moments = dict.fromkeys(SHAPES, (0.0, 0.0, 0))
    at["mean"] = np.zeros(25)
    for step in range(STEPS):
        both = 2 * step, 2 * step + 1
        weights = [float(WEIGHTS[n]) or EMPTY for n in both]
        found = [gradients(n, at) for n in both]
        mean = {n: np.average([f[n] for f in found], axis=0, weights=weights) for n in at}
        at["mean"] = mean.pop("mean")
        present = [w != EMPTY for w in weights]
        if not any(present):
            continue
        flat = np.concatenate([value.ravel() for value in mean.values()])
        share = np.linalg.norm(clipped(flat, limit)) / np.linalg.norm(flat)
        for name, value in mean.items():
            if name == "sometimes" and not np.any(present & ~LACKS[list(both)]):
                continue
            m, v, count = moments[name]
            m, v, count = m + 0.1 * (share * value - m), v, count + 1
            v += 0.001 * ((share * value) ** 2 - v)
            moments[name] = m, v, count
            rate = 0.1 * np.sqrt(1 - 0.999**count) / (1 - 0.9**count)
            at[name] = at[name] - rate * m / (np.sqrt(v) + 0.01)
    return at


@pytest.mark.parametrize("limit", [None, 1.5], ids=["whole", "clipped"])
def test_every_way_makes_the_same_of_mixed_batches(limit: float | None) -> None:
    """A sum over rounds has a unit of its own, so it rounds otherwise."""
    reference = None
    for way, (workers, ps, more) in WAYS.items():
        job = make_job(optimizer=Adam(0.1, epsilon=0.01), clip_norm=limit, **more)
        summary = zmqtrain.run(job, workers=workers, ps=ps)
        reference = reference or summary.parameters
        is_exact = "aggregate" not in str(more)
        for name, value in expected(limit or np.inf).items():
            found = summary.parameters[name]
            np.testing.assert_allclose(found, value, rtol=1e-6, atol=1e-6, err_msg=way)
            assert not is_exact or found.tobytes() == reference[name].tobytes(), (way, name)


async def train(job: Job, exchange: Exchange) -> list[dict[str, bytes]]:
    """Train to the end; return all variables before every step."""
    steps = each_step(job, exchange, lambda number: (np.full(ROWS, number % BATCHES),))
    return [
        {name: value.tobytes() for name, value in values(job, membership).items()}
        async for membership in steps
    ]


@pytest.mark.parametrize("compression", ["none", "int8"])
@pytest.mark.parametrize(
    "fields",
    [
        {"clip_norm": 1.5, "optimizer": Adam(0.1)},
        {"clip_norm": 1.5, "optimizer": Lion(0.1), "policy": "sync-replicas:aggregate=3"},
        {"optimizer": SGD(0.1), "policy": "bounded-staleness:1"},
    ],
    ids=["clipped", "in rounds", "one by one"],
)
async def test_mixed_batches_sent_while_they_are_computed_arrive_as_the_whole_does(
    fields: dict[str, Any], compression: str
) -> None:
    found = []
    for overlap in (False, True):
        job = make_job(compression=compression, overlap=overlap, **fields, **CUT_UP)
        with chunks_of(40):
            async with KINDS["2 ps, by messages"](job) as exchange:
                found.append(await train(job, exchange))
    async with KINDS["local"](job) as exchange:
        alone = await train(job, exchange)
    assert found[0] == found[1]
    assert compression != "none" or found[0] == alone
