"""Assignment of an evaluation's parts to workers, on which the result does not depend."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqtrain.actors.actor import Request
from zmqtrain.chief.evaluation_parts import AHEAD, EvaluationParts, EvaluationWorkers
from zmqtrain.data import Digits
from zmqtrain.errors import ProtocolError
from zmqtrain.exchanges.evaluations import received_sums, tensors_of
from zmqtrain.job import Job
from zmqtrain.metrics import Accuracy, ConfusionMatrix
from zmqtrain.models import MLP
from zmqtrain.optim import SGD
from zmqtrain.training.evaluation import PartSums
from zmqtrain.wire.buffers import Tensor
from zmqtrain.wire.codec import Envelope, Sender
from zmqtrain.wire.control import Evaluate, Evaluated

SUMS = [PartSums(()) for _ in range(12)]
for number, each in enumerate(SUMS):
    each.measures = {"loss": 10.0 ** (number % 5) / 3}


@given(st.integers(1, 12), st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=60))
def test_every_part_is_measured_and_the_sum_has_the_same_bits_whoever_did(
    count: int, turns: list[tuple[int, bool]]
) -> None:
    """In each turn worker w - 1 is lent a part or hands one in, or the chief, w = 0, does."""
    parts = EvaluationParts(count)
    own = parts.next()
    held: list[int] = []
    for worker, hands_in in turns:
        if worker and hands_in and held:
            done = held.pop(worker % len(held))
            assert parts.holder(done) is not None
            parts.add(done, SUMS[done])
        elif worker:
            lent = parts.lend(worker - 1, 1)
            assert not set(lent).intersection(held)
            held += lent
        elif own is not None:
            parts.add(own, SUMS[own])
            own = parts.next()
    while own is not None:  # whatever workers hold is not back
        assert not parts.is_measured(own) or own not in held
        parts.add(own, SUMS[own])
        own = parts.next()
    total = 0.0
    for sums in SUMS[:count]:
        total += sums.measures["loss"]
    assert parts.total(()).measures == {"loss": total}


def test_what_was_lent_longest_ago_is_measured_by_the_chief_first_and_counts_once() -> None:
    parts = EvaluationParts(4)
    assert parts.next() == 0
    assert (parts.lend(7, 2), parts.lend(8, 2)) == ((3, 2), (1,))
    assert [parts.holder(part) for part in range(4)] == [None, 8, 7, 7]
    assert parts.next() == 3
    parts.add(3, SUMS[3])
    parts.add(3, SUMS[4])  # the worker's, too late
    assert parts.next() == 2
    for part in (0, 1, 2):
        parts.add(part, SUMS[part])
    assert parts.next() is None
    expected = SUMS[0].measures["loss"] + SUMS[1].measures["loss"]
    expected = expected + SUMS[2].measures["loss"] + SUMS[3].measures["loss"]
    assert parts.total(()).measures == {"loss": expected}


METRICS = (Accuracy(), ConfusionMatrix(2))


def tensors(*arrays: Any) -> tuple[Tensor, ...]:
    return tuple(Tensor.of(np.asarray(array)) for array in arrays)


@dataclass
class Asked:
    """Requests to workers and their answers, without a cluster."""

    workers: tuple[int, ...] = (0, 2)
    sent: list[Evaluate] = field(default_factory=list)

    def __post_init__(self) -> None:
        job = Job(model=MLP(64, 2, 10), data=Digits(), optimizer=SGD(0.1), metrics=METRICS, steps=1)
        self.lender = EvaluationWorkers(job, self.sent.append, lambda: self.workers)

    def begin(self, count: int) -> EvaluationParts:
        parts = EvaluationParts(count)
        parts.next()
        self.lender.begin(parts, 30, "20 examples")
        return parts

    def answer(self, part: int, *sums: Any, evaluation: str = "") -> None:
        name = evaluation or self.sent[-1].evaluation
        message = Evaluated(name, part, 1.0, {"loss": 1.0})
        envelope = Envelope(message, Sender("ps", 0), tensors=tensors(*sums))
        request: Any = Request(None, None, b"", envelope)  # type: ignore[arg-type]
        self.lender.on_evaluated(request, message)

    @property
    def lent(self) -> list[tuple[int, tuple[int, ...]]]:
        return [(message.worker, message.parts) for message in self.sent]


GOOD = (np.ones(2), np.ones((2, 2)))


def test_workers_get_another_part_for_each_and_are_told_of_the_end() -> None:
    asked = Asked()
    parts = asked.begin(8)
    assert asked.lent == [(0, (7, 6)), (2, (5, 4))]
    assert all(len(message.parts) == AHEAD for message in asked.sent)
    assert {(message.version, message.data) for message in asked.sent} == {(30, "20 examples")}
    asked.answer(5, *GOOD)
    assert parts.is_measured(5)
    assert asked.lent[2:] == [(2, (3,))]
    asked.lender.end()
    assert asked.lent[3:] == [(0, ()), (2, ())]
    asked.answer(7, *GOOD)
    assert not parts.is_measured(7)


def test_answer_about_another_evaluation_or_a_part_of_nobody_is_not_taken() -> None:
    asked = Asked()
    asked.begin(8)
    before = asked.sent[-1].evaluation
    parts = asked.begin(8)
    asked.answer(7, *GOOD, evaluation=before)
    asked.answer(1, *GOOD)
    asked.answer(99, *GOOD)
    assert not any(map(parts.is_measured, range(8)))


@pytest.mark.parametrize(
    "sums", [(), GOOD[:1], (*GOOD, np.ones(1)), (np.ones(2, np.float32), np.ones((2, 2)))]
)
def test_sums_of_other_metrics_are_refused(sums: tuple[Any, ...]) -> None:
    asked = Asked()
    parts = asked.begin(8)
    with pytest.raises(ProtocolError):
        asked.answer(7, *sums)
    assert not parts.is_measured(7)


def test_sums_are_the_same_after_they_have_travelled() -> None:
    sums = PartSums(METRICS)
    outputs, batch = np.eye(2)[[0, 1, 1]], (np.zeros((3, 2)), np.array([0, 1, 0]))
    sums.metrics.add(outputs, batch)
    sums.add_measures({"loss": 1 / 3}, 2.5)
    message = Evaluated("0", 0, sums.weight, sums.measures)
    again = received_sums(METRICS, message, tensors_of(sums))
    total = PartSums(METRICS)
    total.add(again)
    found, expected = total.results(3, MLP(2, 2, 2)), sums.results(3, MLP(2, 2, 2))
    assert found.keys() == expected.keys() == {"loss", "accuracy", "confusion_matrix"}
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)
