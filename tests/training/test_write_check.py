"""A model that writes to parameters which other tasks use."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import zmqtrain
from zmqtrain import Job
from zmqtrain.errors import ConfigError
from zmqtrain.models.checks import CheckSchedule
from zmqtrain.optim import SGD
from zmqtrain.training.write_check import WriteCheck


class Halving:
    """Halves its parameter in each step, and has a gradient of 0."""

    def parameters(self, seed: int) -> dict[str, Any]:
        return {"w": np.ones(4, np.float32)}

    def loss_and_gradients(self, parameters: Any, batch: Any, out: Any) -> float:
        parameters["w"][...] *= 0.5
        out["w"][...] = 0.0
        return 1.0

    def metrics(self, parameters: Any, batch: Any) -> dict[str, float]:
        return {"loss": 1.0}


JOB = Job(
    model=Halving(),
    data=(np.zeros((8, 1), np.float32),),
    optimizer=SGD(1.0),
    steps=3,
    batch_size=4,
    policy="sync-replicas",
)


def test_write_to_a_parameter_counts_on_one_worker_alone() -> None:
    np.testing.assert_array_equal(zmqtrain.run(JOB).parameters["w"], np.full(4, 0.125))


@pytest.mark.parametrize("form", [{"workers": 2}, {"workers": 2, "ps": 0}, {"ps": 1}])
def test_write_to_a_shared_parameter_is_refused(form: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="read-only"):
        zmqtrain.run(JOB, **form)


class Replacing(Halving):
    def loss_and_gradients(self, parameters: Any, batch: Any, out: Any) -> float:
        parameters["w"] = parameters["w"] * 0.5
        return super().loss_and_gradients(parameters, batch, out)


@pytest.mark.parametrize("form", [{}, {"ps": 1}])
def test_array_that_replaces_a_parameter_is_refused(form: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="does not support item assignment"):
        zmqtrain.run(JOB.model_copy(update={"model": Replacing()}), **form)


def by_address(array: Any) -> Any:
    """Return an array over the same memory that may be written to, as frameworks do."""
    interface = array.__array_interface__
    writable = interface | {"data": (interface["data"][0], False)}
    return np.asarray(type("Memory", (), {"__array_interface__": writable, "keeps": array})())


@pytest.mark.parametrize("every", [1, 2, 4, 6, 7, 10])
def test_write_in_every_kth_step_is_found_and_the_shared_memory_stays(every: int) -> None:
    shared = np.ones(4, np.float32)
    shared.flags.writeable = False
    watch = WriteCheck("Model", {"w": shared}, {})
    with pytest.raises(ConfigError, match="'w'"):
        for step in range(1, 1000):
            parameters = watch.begin()
            is_private = parameters["w"] is not shared
            if step % every == 0 and is_private:
                by_address(parameters["w"])[0] = 2.0
            watch.check(parameters)
    assert shared[0] == 1.0


def test_some_of_the_steps_are_checked() -> None:
    schedule = CheckSchedule()
    assert [n for n in range(1, 60) if schedule.is_due()] == [1, 2, 3, 5, 8, 13, 21, 34, 55]
