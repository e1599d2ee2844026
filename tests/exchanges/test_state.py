"""Variables that are not trained: what becomes of them in every exchange."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from tests.chunk_sizes import chunks_of
from tests.exchanges.conftest import KINDS, OpenExchange, each_step, values
from zmqtrain import Job
from zmqtrain.compute.device import Cpu
from zmqtrain.compute.threads import ThreadTeam
from zmqtrain.data import Arrays
from zmqtrain.errors import ConfigError
from zmqtrain.models.base import written
from zmqtrain.optim import LAMB, SGD, AdamW
from zmqtrain.training.exchange import Exchange
from zmqtrain.training.model_runner import ModelRunner

COMPRESSIONS = ["none", "bf16", "int8", "topk:ratio=0.5"]
ROWS = np.random.default_rng(0).standard_normal((64, 3), np.float32) * 2 + 5
SCALE = np.array([1, 2, 3], np.float64)


class Normalised:
    """A linear model on normalised features: running mean, a counter, and fixed scales."""

    def parameters(self, seed: int) -> dict[str, Any]:
        return {"w": np.full((3, 2), 0.5, np.float32)}

    def state(self, seed: int) -> dict[str, Any]:
        return {
            "mean": np.zeros(3, np.float32),
            "half": np.zeros((2, 3), np.float16),
            "count": np.array(2**40, np.int64),
            "seen": np.zeros(5, np.bool_),
        }

    def frozen(self, seed: int) -> dict[str, Any]:
        return {"scale": SCALE}

    def loss_and_gradients(self, parameters: Any, batch: Any, out: Any) -> float:
        (rows,) = batch
        mean = rows.mean(0)
        out["mean"][...] = 0.9 * parameters["mean"] + 0.1 * mean
        out["half"][1] = mean
        out["count"] = parameters["count"] + 1
        out["seen"][int(parameters["count"]) % 5] = True
        inputs = (rows - mean) * parameters["scale"]
        residuals = inputs @ parameters["w"] - 1
        out["w"][...] = inputs.T @ residuals / len(rows)
        written(out, "w")
        return float((residuals**2).mean())

    def metrics(self, parameters: Any, batch: Any) -> dict[str, float]:
        return {"loss": 0.0}


def make_job(model: Any = None, **fields: Any) -> Job:
    defaults = {"batch_size": 4, "steps": 6, "partition_nbytes": 8, "optimizer": SGD(0.01)}
    return Job(model=model or Normalised(), data=Arrays((ROWS,), (ROWS,)), **defaults | fields)


async def train(job: Job, exchange: Exchange) -> list[dict[str, Any]]:
    """Train to the end; return all variables before every step."""
    steps = each_step(job, exchange, lambda number: (ROWS[4 * number : 4 * number + 4],))
    return [values(job, membership) async for membership in steps]


@pytest.mark.parametrize("compression", COMPRESSIONS)
async def test_gradient_sent_while_it_is_computed_arrives_as_the_whole_does(
    open_exchange: OpenExchange, compression: str
) -> None:
    found = []
    for overlap in (False, True):
        job = make_job(compression=compression, overlap=overlap)
        with chunks_of(2):
            async with open_exchange(job) as exchange:
                found.append(await train(job, exchange))
    for now, then in zip(*found, strict=True):
        assert {name: value.tobytes() for name, value in now.items()} == {
            name: value.tobytes() for name, value in then.items()
        }


@pytest.mark.parametrize(
    ("policy", "compression"),
    [
        ("hogwild", "bf16"),
        ("bounded-staleness:1", "int8"),
        ("sync-replicas", "none"),
        ("sync-replicas", "topk:ratio=0.5"),
    ],
)
async def test_every_step_assigns_the_state_once_and_exactly(
    open_exchange: OpenExchange, policy: str, compression: str
) -> None:
    job = make_job(policy=policy, compression=compression, l2=0.5, clip_norm=0.1)
    async with open_exchange(job) as exchange:
        found = await train(job, exchange)
    mean, half = np.zeros(3, np.float32), np.zeros((2, 3), np.float16)
    for step, now in enumerate(found):
        if step:
            half[1] = ROWS[4 * step - 4 : 4 * step].mean(0)
            mean = 0.9 * mean + 0.1 * ROWS[4 * step - 4 : 4 * step].mean(0)
        assert {name: value.dtype.name for name, value in now.items()} == {
            "w": "float32",
            "mean": "float32",
            "half": "float16",
            "count": "int64",
            "seen": "bool",
        }
        np.testing.assert_array_equal(now["mean"], mean)
        np.testing.assert_array_equal(now["half"], half)
        assert now["count"] == 2**40 + step
        assert now["seen"].sum() == min(step, 5)


async def test_update_of_two_gradients_takes_the_mean_of_floats_and_the_first_of_the_rest(
    open_exchange: OpenExchange,
) -> None:
    job = make_job(policy="sync-replicas:aggregate=2", moving_average=0.9, steps=3)
    async with open_exchange(job) as exchange:
        found = await train(job, exchange)
    means = [ROWS[4 * batch : 4 * batch + 4].mean(0) for batch in range(2)]
    np.testing.assert_array_equal(found[1]["mean"], found[0]["mean"])
    np.testing.assert_array_equal(
        found[2]["mean"], ((np.float32(0.1) * means[0]) + (np.float32(0.1) * means[1])) / 2
    )
    assert found[2]["count"] == 2**40 + 1


@pytest.mark.parametrize("consistent", [False, True])
async def test_exact_state_that_is_being_assigned_is_not_read_in_place(consistent: bool) -> None:
    seen = []

    class Looks(Normalised):
        def loss_and_gradients(self, parameters: Any, batch: Any, out: Any) -> float:
            seen.append(int(parameters["count"]))
            return super().loss_and_gradients(parameters, batch, out)

    job = make_job(Looks(), consistent_reads=consistent)
    async with KINDS["1 ps, in place"](job) as exchange:
        membership = await exchange.join()
        runner = ModelRunner(job, Cpu(), ThreadTeam(1), exchange.written)
        runner.bind(membership)
        (layout,), (flat,) = membership.layouts, membership.parameters
        flat.flags.writeable = True
        flat[layout.averaged :] = 255  # as a ps would in the middle of an update
        runner.load_parameters()
        exchange.begin()
        runner.compute((ROWS[:4],), 0, 4)
        exchange.leave("the test is over")
    assert seen == [2**40]


@pytest.mark.parametrize("optimizer", [AdamW(0.1), LAMB(0.1)], ids=lambda rule: type(rule).__name__)
def test_optimizer_makes_of_what_is_trained_the_same_beside_state(optimizer: Any) -> None:
    class Alone(Normalised):
        def state(self, seed: int) -> dict[str, Any]:
            return {}

        def loss_and_gradients(self, parameters: Any, batch: Any, out: Any) -> float:
            state = Normalised().state(0)
            all_of_it = {**out, **{name: value.copy() for name, value in state.items()}}
            return super().loss_and_gradients({**parameters, **state}, batch, all_of_it)

    async def weights(model: Any) -> Any:
        from tests.exchanges.conftest import local

        job = make_job(model, optimizer=optimizer, l2=0.1, clip_norm=1.0, moving_average=0.9)
        async with local(job) as exchange:
            return (await train(job, exchange))[-1]["w"]

    both = asyncio.run(weights(Normalised())), asyncio.run(weights(Alone()))
    np.testing.assert_array_equal(*both)


class Wrong(Normalised):
    """Writes a count of another kind."""

    def __init__(self, count: Any) -> None:
        self.count = count

    def loss_and_gradients(self, parameters: Any, batch: Any, out: Any) -> float:
        out["count"] = self.count
        return 0.0


@pytest.mark.parametrize("count", [np.zeros(2, np.int64), np.float32(1), np.int32(1), 3])
async def test_new_value_of_another_shape_or_dtype_is_an_error(
    open_exchange: OpenExchange, count: Any
) -> None:
    job = make_job(Wrong(count))
    async with open_exchange(job) as exchange:
        with pytest.raises(ConfigError, match="'count'"):
            await train(job, exchange)


class Named(Normalised):
    def __init__(self, **state: Any) -> None:
        self._state = state

    def state(self, seed: int) -> dict[str, Any]:
        return self._state


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({"w": np.zeros(1, np.int32)}, "two variables called 'w'"),
        ({"scale": np.zeros(1)}, "two variables called 'scale'"),
        ({"s": np.zeros(1, np.complex64)}, "complex64 ndarray"),
        ({"s": np.zeros(1, object)}, "object ndarray"),
        ({"s": [1.0]}, "'s' in state.* is a list"),
    ],
)
def test_state_that_cannot_be_kept_is_an_error(state: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make_job(Named(**state)).variables()
