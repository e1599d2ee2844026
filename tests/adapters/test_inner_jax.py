"""Transformations of optax inside local steps: one worker against a compiled loop of one's own."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")

from jax import numpy as jnp  # noqa: E402

import zmqtrain  # noqa: E402
from tests.adapters.inner import CLASSES, ROWS, job_with  # noqa: E402
from zmqtrain import Job  # noqa: E402
from zmqtrain.adapters.jax import JaxModel  # noqa: E402
from zmqtrain.adapters.jax_inner import JaxInner  # noqa: E402
from zmqtrain.callbacks import LearningRateScheduler  # noqa: E402
from zmqtrain.data.batches import BatchPlan  # noqa: E402
from zmqtrain.errors import ConfigError  # noqa: E402
from zmqtrain.optim import SGD  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 12


def init(key: Any) -> Any:
    first, second = jax.random.split(key)
    head = {"weight": jax.random.normal(second, (8, 3)), "bias": jnp.zeros(3)}
    return {"body": [jax.random.normal(first, (5, 8))], "head": head}


def loss(parameters: Any, batch: Any, key: Any) -> Any:
    x, y = batch
    outputs = jnp.tanh(x @ parameters["body"][0]) @ parameters["head"]["weight"]
    scores = jax.nn.log_softmax(outputs + parameters["head"]["bias"])
    return -jnp.take_along_axis(scores, y[:, None], 1).mean()


def job(inner: Any, **fields: Any) -> Job:
    return job_with(fields.pop("model", JaxModel(init, loss)), inner, **fields)


def heads_apart(parameters: Any) -> Any:
    return {"body": ["matrices"], "head": "rest"}


TRANSFORMATIONS = {
    "schedule": optax.adam(optax.cosine_decay_schedule(0.1, 20)),
    "by labels": optax.multi_transform(
        {"matrices": optax.contrib.muon(0.02), "rest": optax.adamw(0.01)}, heads_apart
    ),
}


@cache
def by_jax(case: str) -> Any:
    """Return the leaves after the steps of a compiled loop."""
    transformation, parameters = TRANSFORMATIONS[case], init(jax.random.key(0))
    state, gradient = jax.jit(transformation.init)(parameters), jax.jit(jax.grad(loss))

    @jax.jit
    def update(gradients: Any, state: Any, parameters: Any) -> Any:
        updates, state = transformation.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state

    plan = BatchPlan(len(ROWS), 8, 0)
    for step in range(STEPS):
        at = plan.indices(step)
        gradients = gradient(parameters, (ROWS[at], CLASSES[at]), None)
        parameters, state = update(gradients, state, parameters)
    return jax.tree.leaves(parameters)


@pytest.mark.parametrize("case", TRANSFORMATIONS)
def test_one_worker_ends_as_a_loop_of_optax_bit_for_bit(case: str) -> None:
    same_bits(zmqtrain.run(job(TRANSFORMATIONS[case])).parameters, by_jax(case))


def same_bits(found: dict[str, Any], expected: Any) -> None:
    for (name, value), own in zip(found.items(), expected, strict=True):
        assert value.tobytes() == np.asarray(own).tobytes(), name


def test_kept_state_makes_a_resumed_job_end_as_a_loop_without_a_break(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"inner_state": "keep", "logdir": str(tmp_path)}
    zmqtrain.run(job(TRANSFORMATIONS["schedule"], steps=5, **fields))
    found = zmqtrain.run(job(TRANSFORMATIONS["schedule"], **fields))
    same_bits(found.parameters, by_jax("schedule"))


def inner_of(transformation: Any) -> tuple[JaxInner, dict[str, Any]]:
    values = {"w": np.zeros(1, np.float32)}
    return JaxInner(transformation, dict, values, {"w": np.ones(1, np.float32)}), values


HALVING = optax.exponential_decay(1.0, 1, 0.5)


@pytest.mark.parametrize(
    "transformation",
    [
        optax.sgd(HALVING),
        optax.inject_hyperparams(optax.sgd)(learning_rate=HALVING),
        optax.chain(optax.masked(optax.sgd(HALVING), lambda tree: {"w": True})),
    ],
)
def test_joiner_has_the_rate_of_the_jobs_step(transformation: Any) -> None:
    inner, values = inner_of(transformation)
    for step, expected in ((4, 1 / 16), (9, 1 / 512)):
        inner.go_on(step, None)
        before = values["w"].copy()
        inner.update(())
        np.testing.assert_allclose(before - values["w"], expected, rtol=1e-5)


def test_edited_rate_counts_after_a_resume() -> None:
    def injected(rate: float) -> tuple[JaxInner, dict[str, Any]]:
        return inner_of(optax.inject_hyperparams(optax.sgd)(learning_rate=rate, momentum=0.5))

    before, _ = injected(1.0)
    before.update(())
    after, values = injected(0.25)
    after.load(before.state())
    after.update(())
    assert values["w"] == -0.25 * 1.5


def test_callback_sets_the_rate_of_a_transformation_that_has_one() -> None:
    inner, values = inner_of(optax.inject_hyperparams(optax.sgd)(learning_rate=1.0))
    inner.go_on(0, 0.25)
    inner.update(())
    assert values["w"] == -0.25


def test_callback_cannot_set_the_rate_of_another_transformation() -> None:
    fields: dict[str, Any] = {"optimizer": SGD(0.1), "inner": optax.adam(0.1), "epochs": 2}
    rates = [LearningRateScheduler(lambda *_: 0.05)]
    model, data = JaxModel(init, loss), (ROWS, CLASSES)
    given = Job(model=model, data=data, policy="local-steps:5", callbacks=rates, **fields)
    with pytest.raises(ConfigError, match="inject_hyperparams"):
        zmqtrain.run(given)


def test_frozen_parameters_stay_as_they_are() -> None:
    model = JaxModel(init, loss, frozen=["head.*"])
    found = zmqtrain.run(job(optax.adamw(0.1, weight_decay=0.5), model=model)).parameters
    begun = init(jax.random.key(0))
    np.testing.assert_array_equal(found["head.weight"], begun["head"]["weight"])
    assert (found["body.0"] != begun["body"][0]).any()


@pytest.mark.parametrize(
    ("inner", "text"),
    [
        (optax.MultiSteps(optax.adam(0.1), 4), "MultiSteps adds gradients up"),
        (optax.adam, "expected a rule of zmqtrain.optim, or one of its framework"),
        (partial(optax.adam, 0.1), "such as optax.adam"),
    ],
)
def test_what_is_no_transformation_is_refused(inner: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        zmqtrain.run(job(inner))
