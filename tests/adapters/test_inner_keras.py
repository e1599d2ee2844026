"""Optimizers of Keras inside local steps: one worker against Keras's own steps."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")  # make test-frameworks runs both
keras = pytest.importorskip("keras")

import zmqtrain  # noqa: E402
from tests.adapters.inner import CLASSES, ROWS, job_with  # noqa: E402
from tests.adapters.step import same  # noqa: E402
from zmqtrain import Job  # noqa: E402
from zmqtrain.adapters.keras import KerasModel  # noqa: E402
from zmqtrain.data.batches import BatchPlan  # noqa: E402
from zmqtrain.errors import ConfigError  # noqa: E402

optimizers = keras.optimizers
pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 12


def net() -> Any:
    layers = keras.layers
    stack = [keras.Input((5,)), layers.Dense(8, "tanh"), layers.BatchNormalization()]
    model = keras.Sequential([*stack, layers.Dense(3)])
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def job(inner: Any, **fields: Any) -> Job:
    return job_with(KerasModel(net), inner, **fields)


def cosine() -> Any:
    return optimizers.schedules.CosineDecay(0.05, 20)


OPTIMIZERS = {
    "nadam": lambda: optimizers.Nadam(0.01, clipnorm=0.1),
    "adadelta with a schedule": lambda: optimizers.Adadelta(cosine(), weight_decay=0.1),
    "adafactor": lambda: optimizers.Adafactor(0.01),
    "muon": lambda: optimizers.Muon(0.01),
    "adam": lambda: optimizers.Adam(0.01, global_clipnorm=0.2),
}


def by_keras(optimizer: Any) -> dict[str, Any]:
    """Return the variables after the steps of Keras's own training."""
    keras.utils.set_random_seed(0)
    keras.backend.clear_session()
    model = net()
    model.compile(optimizer, model.loss)
    plan = BatchPlan(len(ROWS), 8, 0)
    for step in range(STEPS):
        at = plan.indices(step)
        model.train_on_batch(ROWS[at], CLASSES[at])
    return {v.path: keras.ops.convert_to_numpy(v) for v in model.variables}


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_one_worker_ends_as_keras_own_training(case: str) -> None:
    found = zmqtrain.run(job(OPTIMIZERS[case]())).parameters
    expected = by_keras(OPTIMIZERS[case]())
    tolerance = 0.0 if keras.backend.backend() == "torch" else 1e-5  # jax compiles a whole step
    same(found, {name: expected[name] for name in found}, tolerance)


def test_kept_state_makes_a_resumed_job_end_as_one_without_a_break(tmp_path: Path) -> None:
    inner = OPTIMIZERS["adadelta with a schedule"]()
    expected = zmqtrain.run(job(inner, steps=15)).parameters
    fields: dict[str, Any] = {"inner_state": "keep", "logdir": str(tmp_path)}
    zmqtrain.run(job(inner, steps=10, **fields))
    same(zmqtrain.run(job(inner, steps=15, **fields)).parameters, expected)


def test_edited_rate_counts_after_a_resume(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"inner_state": "keep", "logdir": str(tmp_path)}
    first = zmqtrain.run(job(optimizers.SGD(0.1), steps=5, **fields)).parameters
    found = zmqtrain.run(job(optimizers.SGD(0.0), steps=10, **fields)).parameters
    assert all((found[name] == first[name]).all() for name in found if "dense" in name)


@pytest.mark.parametrize(
    ("inner", "text"),
    [
        (lambda: optimizers.Adam(use_ema=True), "use_ema of Adam is True"),
        (lambda: optimizers.Adam(gradient_accumulation_steps=2), "give a larger batch_size"),
        (lambda: optimizers.Adam(lambda: 0.1), "a function of nothing"),
        (lambda: optimizers.Adam, "such as keras.optimizers.Nadam"),
    ],
)
def test_what_cannot_act_inside_is_refused(inner: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        job(inner())
