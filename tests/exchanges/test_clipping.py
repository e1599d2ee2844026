"""Clipping limits the mean gradient of an update, however it comes about."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import zmqtrain
from tests.exchanges.test_board import CUT
from zmqtrain import Job
from zmqtrain.data import Arrays
from zmqtrain.models.base import BaseModel
from zmqtrain.optim import SGD

ROWS = np.random.default_rng(7).normal(size=(64, 425)).astype(np.float32)
ROWS[::2] *= 0.01
STEPS, RATE = 3, 0.1


class Rows(BaseModel):
    """Its gradient is the mean row of the batch; slices end within lines of memory."""

    def parameters(self, seed: int) -> dict[str, Any]:
        return {"w": np.ones((60, 7), np.float32), "b": np.ones(5, np.float32)}

    def loss_and_gradients(self, parameters: Any, batch: Any, out: Any) -> float:
        mean = batch[0].mean(axis=0)
        out["w"][...], out["b"][...] = mean[:420].reshape(60, 7), mean[420:]
        return 1.0

    def metrics(self, parameters: Any, batch: Any) -> dict[str, float]:
        return {}


def make_job(**fields: Any) -> Job:
    defaults = {"optimizer": SGD(RATE), "policy": "sync-replicas", "steps": STEPS, "batch_size": 4}
    return Job(model=Rows(), data=Arrays((ROWS,)), **defaults | fields)


def trained(workers: int, ps: int, **fields: Any) -> NDArray[np.float32]:
    summary = zmqtrain.run(make_job(**fields), workers=workers, ps=ps)
    assert summary.exit_code == 0
    return np.concatenate([summary.parameters["w"].ravel(), summary.parameters["b"]])


def expected(
    gradients: int = 2, *, norm: float = np.inf, each: float = np.inf, value: float = np.inf
) -> NDArray[np.float64]:
    """Return in float64 what SGD makes of steps with so many gradients of 4 rows each."""
    plan, found = make_job().plan(len(ROWS)), np.ones(425)
    for step in range(STEPS):
        rows = [ROWS[plan.indices(step * gradients + n)].astype(float) for n in range(gradients)]
        means = [clipped(part.mean(axis=0), each) for part in rows]
        found -= RATE * np.clip(clipped(np.mean(means, axis=0), norm), -value, value)
    return found


def clipped(gradient: Any, norm: float) -> Any:
    return gradient * min(1.0, norm / np.linalg.norm(gradient))


CUT_UP: dict[str, Any] = {"partition_nbytes": CUT}
TWICE: dict[str, Any] = {"policy": "sync-replicas:aggregate=2"}

WAYS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "one ps": (2, 1, {}),
    "three ps": (2, 3, CUT_UP),
    "board": (2, 0, {"exchange": "board"}),
    "direct": (2, 0, {"exchange": "direct"} | CUT_UP),
    "copies": (2, 0, {"exchange": "direct", "copies": 2} | CUT_UP),
    "one-shot": (2, 0, {"exchange": "one-shot"}),
    "two devices": (1, 0, {"devices": ("cpu:0", "cpu:1")}),
    "one worker twice": (1, 0, TWICE),
    "two ps, one worker twice": (1, 2, TWICE | CUT_UP),
}


@pytest.mark.parametrize(
    ("options", "limits"),
    [({"clip_norm": 2.0}, {"norm": 2.0}), ({"clip_value": 0.3}, {"value": 0.3})],
    ids=["norm", "value"],
)
def test_mean_is_clipped_with_the_same_bits_in_every_way(
    options: dict[str, float], limits: dict[str, float]
) -> None:
    found = {way: trained(w, ps, **options, **more) for way, (w, ps, more) in WAYS.items()}
    np.testing.assert_allclose(found["one ps"], expected(**limits), rtol=2e-7)
    for way, parameters in found.items():
        np.testing.assert_array_equal(parameters, found["one ps"], way)


@pytest.mark.parametrize("policy", ["hogwild", "hogwild:whole"])
@pytest.mark.parametrize("ps", [0, 1, 3])
def test_gradient_that_is_an_update_by_itself_is_clipped_as_a_whole(ps: int, policy: str) -> None:
    """Of two devices it is their mean."""
    alone = trained(1, ps, clip_norm=2.0, policy=policy, **CUT_UP)
    np.testing.assert_allclose(alone, expected(1, norm=2.0), rtol=2e-7)
    two = trained(1, ps, clip_norm=2.0, policy=policy, devices=("cpu:0", "cpu:1"), **CUT_UP)
    np.testing.assert_allclose(two, expected(2, norm=2.0), rtol=2e-7)


def test_each_gradient_can_be_clipped_before_their_mean() -> None:
    found = trained(2, 1, clip_norm_each=2.0)
    np.testing.assert_allclose(found, expected(each=2.0), rtol=1e-6)
    assert abs(found - expected(norm=2.0)).max() > 0.01
