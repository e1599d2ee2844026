"""The model over an exchange's memory: which gradients it reports while it computes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.plans import planned
from zmqtrain import Job
from zmqtrain.compute.device import Cpu, Device
from zmqtrain.compute.threads import ThreadTeam
from zmqtrain.data import Arrays
from zmqtrain.errors import ConfigError
from zmqtrain.models import written
from zmqtrain.models.rows import InitialRows
from zmqtrain.models.tables import Ids, Initial, Rows, Table
from zmqtrain.optim import SGD
from zmqtrain.training.exchange import Membership
from zmqtrain.training.model_runner import ModelRunner

BATCH = (np.ones((2, 3), np.float32),)


class Reporting:
    """Has two variables, whose gradients a test directs."""

    def __init__(
        self, *, replaces: bool = False, copies: bool = False, extra: str = "", b: str = "whole"
    ) -> None:
        self.replaces, self.copies, self.extra, self.b = replaces, copies, extra, b
        self.loss = 0.5

    def parameters(self, seed: int) -> dict[str, Any]:
        return {"a": np.zeros((4, 2), np.float32), "b": np.zeros(3, np.float32)}

    def loss_and_gradients(self, parameters: Any, batch: Any, out: Any) -> float:
        match self.b:
            case "whole":
                out["b"][...] = 2.0
            case "in part":
                out["b"][1:] = 2.0
            case "added":
                out["b"] += 2.0
        if self.copies:
            out = dict(out)
        if self.replaces:
            out["a"] = np.ones((4, 2), np.float64)
        else:
            out["a"][...] = 1.0
        if self.extra:
            out[self.extra] = np.zeros(1)
        written(out, "a", "b")
        return self.loss

    def metrics(self, parameters: Any, batch: Any) -> dict[str, float]:
        return {}


class Weightless(Reporting):
    """In a batch of zeros nothing counts, but it has a gradient, as that of a regularizer."""

    def weight(self, batch: Any) -> float:
        return 2 * batch[0].any()


class Apart(Cpu):
    """A device with memory of its own, as a GPU."""

    def twins(self, flats: Sequence[Any]) -> list[Any]:
        return [np.zeros_like(flat) for flat in flats]

    def load(self, flats: Sequence[Any], twins: Sequence[Any]) -> None:
        for flat, twin in zip(flats, twins, strict=True):
            twin[...] = flat

    def store(self, twins: Sequence[Any], flats: Sequence[Any]) -> None:
        self.load(twins, flats)

    def begin_store(self, twins: Sequence[Any], flats: Sequence[Any]) -> Any:
        return partial(self.load, twins, flats)


class Bench:
    """A model runner over two shards, one of which holds a part of ``a``."""

    def __init__(self, model: Reporting, device: Device | None = None, **fields: Any) -> None:
        job = Job(
            model=model,
            data=Arrays(BATCH, BATCH),
            optimizer=SGD(),
            batch_size=2,
            partition_nbytes=16,
            **{"overlap": True} | fields,
        )
        layouts = planned(job, ps=2).layouts
        nothing = {"a": np.full((4, 2), np.nan), "b": np.full(3, np.nan)}
        self.gradients = [layout.flat_of(nothing) for layout in layouts]
        self.reported: list[tuple[list[str], bool]] = []
        parameters = [np.zeros(layout.size, np.float32) for layout in layouts]
        rows = InitialRows(job.table_variables())
        membership = Membership(layouts, parameters, self.gradients, (), rows=rows)
        self.runner = ModelRunner(job, device or Cpu(), ThreadTeam(1), self._written)
        self.runner.bind(membership)

    @property
    def is_complete(self) -> bool:
        return all(np.isfinite(gradient).all() for gradient in self.gradients)

    def _written(self, names: Sequence[str]) -> None:
        self.reported.append((sorted(names), self.is_complete))


@pytest.mark.parametrize("device", [None, Apart()], ids=["in the memory", "on a device"])
@pytest.mark.parametrize(
    ("replaces", "reported"), [(False, (["a", "b"], True)), (True, (["b"], False))]
)
def test_gradients_are_reported_once_they_are_in_the_memory(
    replaces: bool, reported: tuple[list[str], bool], device: Device | None
) -> None:
    """One that lies elsewhere is not reported, but is there in the end."""
    bench = Bench(Reporting(replaces=replaces), device)
    report = bench.runner.compute(BATCH, 0, 2)
    assert (report.loss, report.finite) == (0.5, True)
    assert bench.reported == [reported]
    assert bench.is_complete


def test_gradient_of_a_batch_in_which_nothing_counts_is_not_reported_before_it_is_0() -> None:
    bench = Bench(Weightless())
    bench.runner.compute((np.zeros((2, 3), np.float32),), 0, 2)
    assert bench.reported == []
    assert all(not gradient.any() for gradient in bench.gradients)


def test_loss_of_a_batch_in_which_nothing_counts_is_that_of_the_batch_before() -> None:
    runner = Bench(Weightless()).runner
    losses = [runner.compute((np.full((2, 3), x, np.float32),), 0, 2).loss for x in (0, 1, 0)]
    assert losses == [0, 0.5, 0.5]


def test_gradients_in_a_plain_dict_are_not_reported() -> None:
    bench = Bench(Reporting(copies=True))
    bench.runner.compute(BATCH, 0, 2)
    assert bench.reported == []


def test_gradient_of_no_parameter_is_an_error() -> None:
    with pytest.raises(ConfigError, match="'c', which is not a parameter; expected a, b"):
        Bench(Reporting(extra="c")).runner.compute(BATCH, 0, 2)


@pytest.mark.parametrize("b", ["not at all", "in part", "added"])
def test_first_gradient_that_leaves_the_buffer_as_it_was_is_an_error(b: str) -> None:
    model = Reporting(b=b)
    runner, model.loss = Bench(model).runner, math.nan
    assert not runner.compute(BATCH, 0, 2).finite  # without a finite loss a gradient may be missing
    model.loss = 0.5
    with pytest.raises(ConfigError, match=r"'b' .* is not written"):
        runner.compute(BATCH, 1, 2)


def test_gradient_that_is_not_finite_stays_on_a_device_with_its_own_memory() -> None:
    model = Reporting()
    bench, model.loss = Bench(model, Apart(), overlap=False), math.nan
    before = [gradient.copy() for gradient in bench.gradients]
    assert not bench.runner.compute(BATCH, 0, 2).finite
    for gradient, old in zip(bench.gradients, before, strict=True):
        np.testing.assert_array_equal(gradient, old)
    model.loss = 0.5
    report = bench.runner.compute(BATCH, 1, 2)
    assert (report.loss, report.finite) == (0.5, True)
    assert bench.is_complete


class Looking(Reporting):
    """Has a table beside its variables, whose rows a test directs."""

    def __init__(
        self, *, replaces: bool = False, value: float = 1.0, initial: Initial | None = None
    ) -> None:
        super().__init__()
        self.replaced, self.value, self.initial = replaces, value, initial

    def tables(self, seed: int) -> dict[str, Any]:
        return {"unused": Table(dim=3), "user": Table(dim=2, initial=self.initial)}

    def loss_and_gradients(self, parameters: Any, batch: Any, out: Any) -> float:
        if self.replaced:
            out["user"] = np.zeros((3, 2), np.float32)
            return 0.5
        ids = np.array([9, 4, 9])
        rows = parameters["user"].take(ids)
        out["user"].add(ids, rows * 0 + np.float32([[1], [self.value], [2]]))
        return super().loss_and_gradients(parameters, batch, out)


def looking(clip_norm_each: float | None = None, **options: Any) -> Bench:
    return Bench(Looking(**options), overlap=False, clip_norm_each=clip_norm_each)


def test_report_has_the_rows_of_a_step() -> None:
    bench = looking()
    for _ in range(2):  # nothing is left of a step before
        [rows] = bench.runner.compute(BATCH, 0, 2).rows
        assert (rows.table, rows.ids.tolist()) == (1, [4, 9])
        assert rows.rows.tolist() == [[1, 1], [3, 3]]


def test_norm_of_a_gradient_is_that_of_variables_and_rows() -> None:
    whole, part = looking(), looking(clip_norm_each=1.0)
    [before], [after] = (bench.runner.compute(BATCH, 0, 2).rows for bench in (whole, part))
    norm = np.sqrt(8 + 3 * 4 + 2 + 18)
    np.testing.assert_allclose(after.rows, before.rows / norm, 1e-6)


def test_row_with_nan_is_named(caplog: pytest.LogCaptureFixture) -> None:
    assert not looking(value=np.nan).runner.compute(BATCH, 0, 2).finite
    assert "the gradient of row 4 of the table 'user' has NaN or infinity" in caplog.text


class Broken:
    """Row 9 is NaN."""

    def rows(self, key: int, ids: Ids, dim: int) -> Rows:
        return np.where(ids == 9, np.float32(np.nan), np.float32(0)).repeat(dim).reshape(-1, dim)


def test_row_that_makes_the_loss_nan_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model = Looking(initial=Broken())
    runner, model.loss = Bench(model, overlap=False).runner, math.nan
    assert not runner.compute(BATCH, 0, 2).finite
    assert caplog.messages == ["row 9 of the table 'user' has NaN or infinity"]


def test_gradient_of_a_table_cannot_be_replaced() -> None:
    with pytest.raises(ConfigError, match=r"out\['user'\]\.add\(ids, rows\)"):
        looking(replaces=True).runner.compute(BATCH, 0, 2)
