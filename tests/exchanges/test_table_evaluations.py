"""Evaluations of tables while a cluster trains on: of the rows of the step that they name."""

from __future__ import annotations

import logging
import threading
from functools import cache
from typing import Any, ClassVar

import pytest

import zmqtrain
from tests.recommenders import Dense, Recommender, make_job
from zmqtrain import Job
from zmqtrain.models.tables import Table

STEPS, EVERY, WORKERS = 24, 4, 2
PLACES: dict[str, dict[str, Any]] = {
    "one ps": {"ps": 1},
    "three ps": {"ps": 3},
    "board": {"ps": 0},
    "direct": {"ps": 0, "exchange": "direct"},
    "copies": {"ps": 0, "copies": 2},
}


class Passed(Recommender):
    """Waits while it is evaluated, until workers have passed the next step that is kept."""

    computed: ClassVar[int]
    changed: ClassVar[threading.Condition]

    def loss_and_gradients(self, parameters: Any, batch: Any, out: Any) -> float:
        found = super().loss_and_gradients(parameters, batch, out)
        with self.changed:
            Passed.computed += 1
            self.changed.notify_all()
        return found

    def predict(self, parameters: Any, batch: Any) -> Any:
        with self.changed:
            until = min(self.computed + 6 * WORKERS, WORKERS * STEPS)
            assert self.changed.wait_for(lambda: self.computed >= until, timeout=60)
        return super().predict(parameters, batch)


@pytest.fixture(autouse=True)
def fresh() -> None:
    Passed.computed, Passed.changed = 0, threading.Condition()


def job(model: Any, steps: int = STEPS, **fields: Any) -> Job:
    return make_job(model, steps=steps, policy="sync-replicas", **fields)


@cache
def expected(step: int) -> float:
    """Return the loss after so many steps of the same model without tables."""
    return float(zmqtrain.run(job(Dense(), step), workers=WORKERS).measures["loss"])


def on_the_way(place: dict[str, Any], **fields: Any) -> dict[int, float]:
    """Return the losses that were measured before the end, by step."""
    options = {name: place[name] for name in ("copies", "exchange") if name in place}
    of_job = job(Passed(), evaluate_every=EVERY, **options, **fields)
    summary = zmqtrain.run(of_job, workers=WORKERS, ps=place["ps"])
    return {row["step"]: row["loss"] for row in summary.evaluations if row["step"] < STEPS}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_evaluation_has_the_bits_of_the_same_model_without_tables(
    place: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        found = on_the_way(place)
    assert found
    assert "is not evaluated" not in caplog.text
    assert found == {step: expected(step) for step in found}


@pytest.mark.parametrize("place", [{"ps": 2}, {"ps": 0}], ids=["ps", "board"])
def test_rows_that_are_forgotten_meanwhile_are_still_evaluated(place: dict[str, Any]) -> None:
    tables = {"*": Table(max_rows=8, admit_after=1)}
    found = on_the_way(place, tables=tables)
    assert found

    def at_the_end(step: int) -> float:
        run = zmqtrain.run(job(Recommender(), step, tables=tables), workers=WORKERS, **place)
        return float(run.measures["loss"])

    assert found == {step: at_the_end(step) for step in found}
