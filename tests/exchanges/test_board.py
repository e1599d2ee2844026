"""All exchanges between workers compute the same bits, however the variables are cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import zmqtrain
from simulation.fakes import small_parts
from tests.plans import planned
from zmqtrain import Job
from zmqtrain.actors.link import Link
from zmqtrain.data import Arrays
from zmqtrain.errors import FencedError
from zmqtrain.models import MLP
from zmqtrain.models.base import Batch, Gradients, Parameters
from zmqtrain.optim import LAMB, SGD, Adam, Exponential, Ftrl
from zmqtrain.store import segment_layout as segments
from zmqtrain.store.board import Seat

STEPS = 12
ROWS = 92
CUT = 16
"""Bytes of a variable at which it is cut: most are."""


def data() -> Arrays:
    chosen = np.random.default_rng(3)
    rows, classes = chosen.normal(size=(ROWS, 6)).astype(np.float32), chosen.integers(0, 3, ROWS)
    return Arrays((rows, classes), (rows, classes))


class Normed(MLP):
    """A model with statistics, and a count of its batches; its gradient of one batch is NaN."""

    wrong = -1  # which batch

    def __init__(self) -> None:
        super().__init__(6, 8, 3)
        self._batch = -1

    def state(self, seed: int) -> dict[str, Any]:
        return {"mean": np.zeros(6, np.float32), "batches": np.zeros((), np.int64)}

    def seed_batch(self, seed: int, number: int) -> None:
        self._batch = number

    def loss_and_gradients(self, parameters: Parameters, batch: Batch, out: Gradients) -> float:
        out["mean"][...] = 0.9 * parameters["mean"] + 0.1 * batch[0].mean(axis=0)
        out["batches"][...] = parameters["batches"] + 1
        loss = super().loss_and_gradients(parameters, batch, out)
        return float("nan") if self._batch == self.wrong else loss


class WrongOnce(Normed):
    wrong = 9


JOBS: dict[str, dict[str, Any]] = {
    "Adam": {"optimizer": Adam(0.01)},
    "a schedule": {"optimizer": SGD(Exponential(0.1, 5, 0.5))},
    "l2 and clipping": {"l2": 0.01, "clip_norm": 0.1},
    "a moving average": {"moving_average": 0.9, "evaluate_average": True},
    "state": {"model": Normed()},
    "a gradient that is not finite": {"model": WrongOnce()},
    "batches far ahead": {"prefetch": 3},
    "evaluations on the way": {"evaluate_every": 4},
    "epochs with short batches": {"epochs": 4},
}


EVERYTHING: dict[str, dict[str, Any]] = {
    type(rule).__name__: {
        "optimizer": rule, "model": Normed(), "l2": 0.01, "clip_norm": 0.1, "moving_average": 0.9,
    }
    for rule in (Adam(0.01), Ftrl(0.1))
}  # fmt: skip
EVERYTHING["groups"] = {"groups": {"*/bias": {"learning_rate": 0.1}}}
EVERYTHING["overlap"] = {"overlap": True, "model": Normed()}


def outcome(workers: int, ps: int = 1, **fields: Any) -> tuple[Any, ...]:
    """Train, and return what shall not depend on the exchange."""
    ends = {} if "epochs" in fields else {"steps": STEPS}
    defaults = {"model": MLP(6, 8, 3), "optimizer": Adam(0.05), "batch_size": 8} | ends
    job = Job(data=data(), policy="sync-replicas", **defaults | fields)
    summary = zmqtrain.run(job, workers=workers, ps=ps)
    assert summary.exit_code == 0
    return (
        summary.parameters_sha256,
        summary.global_step,
        summary.examples,
        summary.pushes,
        summary.measures,
    )


@pytest.mark.parametrize("fields", JOBS.values(), ids=JOBS)
def test_board_and_cut_shards_give_the_bits_of_one_ps(fields: dict[str, Any]) -> None:
    by_messages = outcome(2, **fields)
    assert outcome(2, exchange="board", **fields) == by_messages
    cut = {"exchange": "direct", "partition_nbytes": CUT} | fields
    assert outcome(2, ps=0, **cut) == by_messages


GREEDY = {"exchange": "direct", "placement": "greedy"}
HELD: tuple[dict[str, Any], ...] = (
    {"exchange": "board"},
    {"exchange": "direct", "copies": 2},
    {"exchange": "to-one"},
    GREEDY,
    {"exchange": "direct"},
    {"exchange": "to-one", "copies": 3},
    {"exchange": "one-shot"},
    GREEDY | {"copies": 2},
)


@pytest.mark.parametrize(
    ("name", "ways"),
    [("Adam", HELD), ("Ftrl", HELD[3:5]), ("groups", HELD[:3]), ("overlap", HELD[4:])],
)
def test_bits_do_not_depend_on_who_holds_which_rows(
    name: str, ways: tuple[dict[str, Any], ...]
) -> None:
    fields = EVERYTHING[name]
    cut = fields | {"partition_nbytes": CUT}
    expected = outcome(3, **fields)
    assert outcome(3, ps=3, **cut) == expected
    for held in ways:
        assert outcome(3, ps=0, **held, **cut) == expected, held


def test_member_with_an_empty_batch_at_the_end_of_a_pass_changes_no_bit() -> None:
    workers, passes, batches = 4, 3, 11  # of which the last has 2 rows
    fields = {"epochs": passes, "batch_size": 9, "partition_nbytes": CUT}
    assert batches % workers and batches == -(-ROWS // 9)
    expected = outcome(workers, **fields)
    assert expected[1:3] == (passes * -(-batches // workers), passes * ROWS)
    assert expected[3]["applied"] == passes * batches
    for exchange in ("board", "direct", "to-one", "one-shot"):
        assert outcome(workers, ps=0, exchange=exchange, **fields) == expected


def test_who_holds_everything_gives_the_bits_of_one_ps_by_any_rule() -> None:
    lamb = {"optimizer": LAMB(0.01), "partition_nbytes": CUT}
    expected = outcome(3, **lamb)
    whole = ({"exchange": "to-one"}, {"exchange": "to-one", "copies": 2}, HELD[6])
    for held in (*whole, {"exchange": "direct"}):  # which cuts no variable of this rule
        assert outcome(3, ps=0, **lamb, **held) == expected, held


def test_variables_are_cut_where_these_tests_mean_it() -> None:
    job = Job(
        model=Normed(), data=data(), optimizer=SGD(0.1), partition_nbytes=CUT, exchange="direct"
    )
    plan = planned(job, ps=0, workers=3)
    assert (planned(job, ps=0, workers=2).shards, plan.shards) == (2, 3)
    cuts = [cut for layout in plan.layouts for cut in layout.slices]
    assert len(cuts) > len(job.variables())


@pytest.mark.parametrize("workers", [1, 4])
def test_board_gives_the_bits_of_messages_to_any_number_of_workers(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_messages = outcome(workers)
    monkeypatch.setattr(segments, "cut", small_parts)  # every worker has something to update
    assert outcome(workers, exchange="board") == by_messages


def test_member_that_the_ps_does_not_know_offers_no_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that never waits would go on for ever in the memory of a ps that is gone."""
    joins, offers, check, offer = [], [0], Link.check, Seat.offer

    def fenced(link: Link) -> None:
        if offers == [5] and len(joins) < 1:
            joins.append(link)
            raise FencedError("ps 0 has a new life")
        check(link)

    def counted(seat: Seat, *report: Any) -> bool:
        offers[0] += 1
        return offer(seat, *report)

    monkeypatch.setattr(Link, "check", fenced)
    monkeypatch.setattr(Seat, "offer", counted)
    assert outcome(1, exchange="board")[1] == STEPS
    assert joins
