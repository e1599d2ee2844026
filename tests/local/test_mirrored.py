"""One process with several devices comes to what as many workers come to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import zmqtrain
from tests.cupy_stand_in import installed
from zmqtrain import Job
from zmqtrain.data import Digits
from zmqtrain.errors import ConfigError
from zmqtrain.fingerprint import fingerprint_difference
from zmqtrain.models import MLP
from zmqtrain.optim import LAMB, SGD, Adam, Ftrl, Momentum
from zmqtrain.planning.job_fingerprint import job_fingerprint

RULES = {"sgd": SGD(0.1), "momentum": Momentum(0.05), "adam": Adam(0.01), "ftrl": Ftrl(0.1),
         "lamb": LAMB(0.01)}  # fmt: skip


def job(devices: int = 0, **fields: Any) -> Job:
    options: dict[str, Any] = {"batch_size": 20, "steps": 30} | fields
    options.setdefault("optimizer", Adam(0.01))
    names = tuple(f"cpu:{index}" for index in range(devices))
    return Job(model=MLP(64, 16, 10), data=Digits(), devices=names, **options)


@pytest.mark.parametrize(("rule", "devices"), [*((rule, 3) for rule in RULES), ("adam", 2)])
def test_devices_come_to_the_bits_of_as_many_workers(rule: str, devices: int) -> None:
    options: dict[str, Any] = {"l2": 0.001, "moving_average": 0.9, "clip_norm": 0.1}
    options["optimizer"] = RULES[rule]
    mirrored = zmqtrain.run(job(devices, **options))
    workers = zmqtrain.run(job(policy="sync-replicas", **options), workers=devices)
    assert mirrored.parameters_sha256 == workers.parameters_sha256
    assert (mirrored.loss, mirrored.examples) == (workers.loss, workers.examples)
    assert (mirrored.strategy, mirrored.policy) == ("mirrored", "sync-replicas")


@pytest.mark.parametrize(("devices", "batch_size"), [(2, 32), (3, 100), (4, 300)])
def test_exact_passes_count_every_example_once_as_one_device_with_the_whole_batch_does(
    devices: int, batch_size: int
) -> None:
    def fitted(**options: Any) -> zmqtrain.Trainer:
        trainer = zmqtrain.Trainer(MLP(64, 16, 10), SGD(0.1), **options)
        trainer.fit(Digits(), epochs=2, verbose=False)
        return trainer

    names = [f"cpu:{index}" for index in range(devices)]
    mirrored = fitted(devices=names, strategy="mirrored", batch_size=batch_size)
    alone = fitted(batch_size=devices * batch_size)
    for name, value in alone.weights.items():
        np.testing.assert_allclose(mirrored.weights[name], value, 1e-3, 1e-5)
    losses = [one.history.history["loss"] for one in (mirrored, alone)]
    np.testing.assert_allclose(*losses, 1e-5)
    assert mirrored.summary is not None
    assert mirrored.summary.examples == 2 * 1438


@pytest.mark.parametrize("ps", [0, 1])
def test_workers_whose_gpus_use_nccl_exchange_as_auto_does(ps: int) -> None:
    options: dict[str, Any] = {"policy": "sync-replicas", "optimizer": SGD(0.1)}
    gpus = {"devices": "gpu:0,gpu:1", "exchange": "nccl"}
    with installed(2):
        found = zmqtrain.run(job(**options).with_overrides(**gpus), workers=2, ps=ps)
    expected = zmqtrain.run(job(2, **options), workers=2, ps=ps)
    assert found.exchange == expected.exchange != "nccl"
    assert found.loss == pytest.approx(expected.loss, rel=1e-4)


@pytest.mark.parametrize("ps", [0, 1, 2])
def test_workers_of_a_cluster_may_have_several_devices_each(ps: int) -> None:
    options: dict[str, Any] = {"policy": "sync-replicas", "optimizer": SGD(0.1)}
    few = zmqtrain.run(job(2, **options), workers=2, ps=ps)
    many = zmqtrain.run(job(**options), workers=4)
    assert few.loss == pytest.approx(many.loss, rel=1e-4)  # (0 + 1) + (2 + 3) is not the same bits
    assert (few.global_step, few.examples) == (many.global_step, many.examples)


def test_workers_with_other_numbers_of_devices_have_other_jobs() -> None:
    two, three = (fingerprint_difference(job_fingerprint(job(n)), job_fingerprint(job(2)))
                  for n in (2, 3))  # fmt: skip
    assert two == ""
    assert three == "devices: 3 there, 2 here"


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"devices": "cuda:0"}, "'cuda:0' is not a device"),
        ({"devices": "cpu:0,"}, "'' is not a device"),
        ({"devices": ","}, "'' is not a device"),
        ({"devices": "cpu:0,,cpu:1"}, "'' is not a device"),
        ({"devices": "cpu:1\u0663"}, "is not a device"),
        ({"devices": ("gpu:0", "gpu:0")}, "gpu:0 is listed twice"),
        ({"strategy": "mirrored"}, "expected devices"),
        ({"devices": ("gpu:0", "gpu:00")}, "'gpu:00' is not a device"),
        ({"exchange": "nccl"}, "exchange is nccl; expected two GPUs or more"),
        ({"exchange": "nccl", "devices": "gpu:0"}, "expected two GPUs or more"),
        ({"exchange": "nccl", "devices": "gpu:0,cpu:0"}, "expected two GPUs or more"),
        ({"devices": ("cpu:0", "cpu:1"), "overlap": True}, "devices"),
    ],
)
def test_job_that_cannot_be_is_told(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Job(model=MLP(64, 16, 10), data=Digits(), optimizer=SGD(0.1), **fields)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "size", "told"),
    [
        ({"strategy": "mirrored"}, {"workers": 2}, "expected 1"),
        ({"strategy": "mirrored"}, {"ps": 1}, "expected 0"),
        ({"batch_size": 1000}, {}, "on each of 2 devices"),
    ],
)
def test_run_that_cannot_be_is_told(
    fields: dict[str, Any], size: dict[str, int], told: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        zmqtrain.run(job(2, **fields), **size)
    assert told in str(caught.value)


def test_loop_of_the_users_own_has_one_device() -> None:
    with pytest.raises(ConfigError, match="one"):
        zmqtrain.attach(job(2))
