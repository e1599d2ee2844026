"""Tables beside devices: of several in a process, and of a ps that updates the rest on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zmqtrain
from tests.cupy_stand_in import installed
from tests.gpu_source import COMPILER
from tests.recommenders import ITEMS, USERS, Dense, Only, Recommender, make_job
from zmqtrain import Job
from zmqtrain.models.tables import Table
from zmqtrain.observe.summary import Summary
from zmqtrain.optim import SGD, Adagrad, Adam, Ftrl, RowwiseAdagrad

RULES: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": SGD(0.5)},
    "adagrad, clipped": {"optimizer": Adagrad(0.3), "clip_norm": 0.05, "l2": 0.01},
    "ftrl": {"optimizer": Ftrl(0.1)},
    "lazy adam": {"optimizer": Adam(0.05)},
    "limited": {"tables": {"*": Table(RowwiseAdagrad(0.1), max_rows=20, admit_after=1)}},
    "each clipped": {"clip_norm_each": 0.01},
}


def job(devices: int = 0, model: Any = None, **fields: Any) -> Job:
    names = tuple(f"cpu:{index}" for index in range(devices))
    return make_job(model, devices=names, policy="sync-replicas", **{"steps": 12} | fields)


def rows(summary: Summary) -> list[Any]:
    """Return all rows of both tables, and the bias."""
    values = summary.parameters
    every = [values[name].take(np.arange(n)) for name, n in (("user", USERS), ("item", ITEMS))]
    return [*every, values["bias"]] if "bias" in values else every


@pytest.mark.parametrize(("rule", "devices"), [*((rule, 3) for rule in RULES.values()), ({}, 2)])
def test_devices_come_to_the_bits_of_as_many_workers(rule: dict[str, Any], devices: int) -> None:
    mirrored = zmqtrain.run(job(devices, **rule))
    workers = zmqtrain.run(job(**rule), workers=devices)
    for found, expected in zip(rows(mirrored), rows(workers), strict=True):
        np.testing.assert_array_equal(found, expected)
    assert mirrored.loss == workers.loss
    assert mirrored.tables == workers.tables


@pytest.mark.parametrize("rule", [SGD(0.5), Adagrad(0.3)], ids=repr)
def test_devices_come_to_the_bits_of_the_same_model_without_tables(rule: Any) -> None:
    tables, dense = (
        zmqtrain.run(job(2, model, optimizer=rule)) for model in (Recommender(), Dense())
    )
    for name in ("user", "item"):
        expected = dense.parameters[name]
        np.testing.assert_array_equal(
            tables.parameters[name].take(np.arange(len(expected))), expected
        )


@pytest.mark.parametrize("place", [{"ps": 2}, {"ps": 0}], ids=["ps", "board"])
def test_workers_of_a_cluster_may_have_several_devices_each(place: dict[str, int]) -> None:
    few = zmqtrain.run(job(2), workers=2, **place)
    many = zmqtrain.run(job(), workers=4)
    for found, expected in zip(rows(few), rows(many), strict=True):
        np.testing.assert_allclose(found, expected, 1e-5, 1e-6)
    assert few.tables["user"]["trained"] == many.tables["user"]["trained"]


def test_model_of_tables_alone_trains_on_several_devices() -> None:
    two, workers = zmqtrain.run(job(2, Only())), zmqtrain.run(job(0, Only()), workers=2)
    for found, expected in zip(rows(two), rows(workers), strict=True):
        np.testing.assert_array_equal(found, expected)


class OnHost(Recommender):
    """Computes on the host what its parameters and its batch have on a GPU."""

    def loss_and_gradients(self, parameters: Any, batch: Any, out: Any) -> float:
        given = {
            name: getattr(value, "get", lambda v=value: v)() for name, value in parameters.items()
        }
        found = {**out, "bias": np.zeros(1, np.float32)}
        loss = super().loss_and_gradients(given, tuple(array.get() for array in batch), found)
        out["bias"][...] = float(found["bias"][0])
        return loss


def test_rows_are_added_up_on_the_host_where_nccl_adds_up_the_rest() -> None:
    """The GPUs and NCCL are stand-ins."""
    with installed(2):
        gpus = job(0, OnHost()).with_overrides(devices="gpu:0,gpu:1", exchange="nccl")
        by_nccl = zmqtrain.run(gpus)
    for found, expected in zip(rows(by_nccl), rows(zmqtrain.run(job(2))), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("place", [{}, {"ps": 2, "workers": 2}], ids=["alone", "two ps"])
@pytest.mark.parametrize("name", ["adagrad, clipped", "limited"])
def test_rows_stay_on_the_host_where_the_rest_is_updated_on_a_gpu(
    place: dict[str, int], name: str, tmp_path: Path
) -> None:
    """The GPU is a stand-in."""
    rule = RULES[name]
    with installed(1):
        on_gpu = job(ps_device="gpu", logdir=str(tmp_path), **rule)
        zmqtrain.run(on_gpu.with_overrides(steps=7), **place)
        found = zmqtrain.run(on_gpu, **place)
    expected = zmqtrain.run(job(**rule), **place)
    for one, other in zip(rows(found), rows(expected), strict=True):
        np.testing.assert_array_equal(one, other)
