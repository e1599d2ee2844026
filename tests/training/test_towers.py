"""Towers: parts of a batch on several devices, and the mean of their gradients."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cupy_stand_in import Communicator, installed
from tests.plans import planned
from zmqtrain import Job
from zmqtrain.compute.threads import ThreadTeam, thread_limit
from zmqtrain.data import Arrays
from zmqtrain.errors import ConfigError
from zmqtrain.optim import SGD
from zmqtrain.training.exchange import Membership
from zmqtrain.training.towers import Towers

SIZE = 3  # examples on one device
TWO = ("cpu:0", "cpu:1")


class Sums:
    """Its gradient is the mean of the examples, each state the sum of them."""

    bad: float | None = None  # an example that it cannot compute

    def parameters(self, seed: int) -> dict[str, Any]:
        return {"w": np.zeros(2, np.float32)}

    def state(self, seed: int) -> dict[str, Any]:
        return {"mean": np.zeros((), np.float32), "count": np.zeros((), np.int64)}

    def seed_batch(self, seed: int, batch: int) -> None:
        self.number = batch

    def loss_and_gradients(self, parameters: Any, batch: Any, out: Any) -> float:
        rows = batch[0]
        if self.bad in rows:
            raise ValueError("a bad example")
        out["w"][...] = [rows.mean(), self.number]
        out["mean"][...], out["count"][...] = rows.sum(), len(rows) + 2**40
        return float(rows.mean())

    def metrics(self, parameters: Any, batch: Any) -> dict[str, float]:
        return {}


class Bench:
    """Towers over the memory of a shard."""

    def __init__(self, devices: tuple[str, ...], model: Any) -> None:
        data = Arrays((np.zeros(100, np.float32),))
        options: dict[str, Any] = {"batch_size": SIZE, "devices": devices}
        if devices[0] == "gpu:0":
            options["exchange"] = "nccl"
        job = Job(model=model, data=data, optimizer=SGD(), **options)
        (self.layout,) = planned(job).layouts
        self.gradient = np.zeros(self.layout.size, np.float32)
        values = self.layout.flat_of(job.initial_values())
        self.towers = Towers(job, ThreadTeam(1))
        self.towers.bind(Membership([self.layout], [values], [self.gradient], ()))

    def compute(self, rows: list[float], number: int = 0) -> tuple[float, bool, dict[str, Any]]:
        """Return loss, whether all is finite, and what lies in the exchange's memory."""
        report = self.towers.compute((np.array(rows, np.float32),), number, len(rows))
        found = {cut.variable.name: cut.value(self.gradient) for cut in self.layout.slices}
        return report.loss, report.finite, found


def threads() -> list[str]:
    """Return the names of the threads of towers."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("cpu:")]


@contextmanager
def bench(devices: tuple[str, ...] = TWO, model: Any = None) -> Iterator[Bench]:
    made = Bench(devices, model or Sums())
    try:
        yield made
    finally:
        made.towers.close()


@given(
    devices=st.sampled_from(["cpu 1", "cpu 2", "cpu 4", "gpu 2", "gpu 3", "gpu 4"]),
    rows=st.lists(st.integers(-100, 100), min_size=1, max_size=4 * SIZE),
    number=st.integers(0, 9),
)
def test_each_example_weighs_the_same_on_any_number_of_devices(
    devices: str, rows: list[int], number: int
) -> None:
    kind, count = devices.split()
    with installed(4):
        check_weights(kind, int(count), rows, number)


def check_weights(kind: str, devices: int, rows: list[int], number: int) -> None:
    rows = rows[: devices * SIZE]
    parts = [rows[start : start + SIZE] for start in range(0, len(rows), SIZE)]
    shares = [len(part) / len(rows) for part in parts]
    with bench(tuple(f"{kind}:{i}" for i in range(devices))) as bound:
        loss, finite, found = bound.compute([float(row) for row in rows], number)
    assert finite
    assert loss == pytest.approx(np.mean(rows), abs=1e-4)
    mean_number = sum(s * (number * devices + i) for i, s in enumerate(shares))
    np.testing.assert_allclose(found["w"], [np.mean(rows), mean_number], 1e-5, 1e-4)
    mean_sum = sum(share * sum(part) for share, part in zip(shares, parts, strict=True))
    np.testing.assert_allclose(found["mean"], mean_sum, 1e-5, 1e-4)
    assert found["count"] == len(parts[0]) + 2**40  # not averaged: that of the first device


def test_batch_with_an_infinite_part_is_not_finite() -> None:
    with bench() as bound:
        assert bound.compute([1, 1, 1, np.inf])[1] is False
        assert bound.compute([1, 1, 1, 1])[1] is True


def test_old_gradient_of_a_gpu_with_nothing_to_do_does_not_count() -> None:
    with installed(3), bench(("gpu:0", "gpu:1", "gpu:2")) as bound:
        before = bound.compute([1.0] * 9)[2]["w"].tolist()
        loss, finite, found = bound.compute([5.0] * 7 + [np.inf] * 2)
        assert not finite
        assert found["w"].tolist() == before  # nothing came to the host
        loss, finite, found = bound.compute([2, 2, 2, 4, 4, 4], number=1)
    assert (loss, finite) == (3.0, True)
    assert found["w"].tolist() == [3.0, 3.5]
    assert (found["mean"], found["count"]) == (9.0, 3 + 2**40)


def test_towers_free_the_communicators_of_nccl() -> None:
    before = Communicator.open
    with installed(2), bench(("gpu:0", "gpu:1")):
        assert Communicator.open == before + 2
    assert Communicator.open == before


@pytest.mark.parametrize(("bad", "device"), [(7, "cpu:0"), (8, "cpu:1")])
def test_error_of_a_tower_names_its_device_and_the_others_go_on(bad: float, device: str) -> None:
    model = Sums()
    model.bad = bad
    with bench(model=model) as bound:
        with pytest.raises(ConfigError) as caught:
            bound.compute([7, 0, 0, 8, 0, 0] if bad == 7 else [0, 0, 0, 8, 0, 0])
        assert device in str(caught.value)
        assert "a bad example" in str(caught.value)
        assert bound.compute([1, 2, 3, 4, 5, 6])[0] == 3.5


def test_towers_compute_side_by_side_each_in_a_thread_and_none_is_left() -> None:
    meeting = threading.Barrier(3, timeout=10)

    class Meeting(Sums):
        def __deepcopy__(self, memo: object) -> Meeting:
            return Meeting()

        def loss_and_gradients(self, parameters: Any, batch: Any, out: Any) -> float:
            meeting.wait()
            assert thread_limit() == 1  # of as many cores as there are: they share them
            return super().loss_and_gradients(parameters, batch, out)

    with bench(("cpu:0", "cpu:1", "cpu:2"), Meeting()) as bound:
        assert bound.compute([1.0] * 9)[1] is True
        assert len(threads()) == 3
    assert threads() == []


def test_model_that_cannot_be_copied_is_refused_and_leaves_no_thread() -> None:
    class Single(Sums):
        def __deepcopy__(self, memo: object) -> Single:
            raise TypeError("there is one")

    with pytest.raises(ConfigError, match="there is one"):
        Bench(TWO, Single())
    assert threads() == []
