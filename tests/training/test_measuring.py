"""Measures of a step beside its loss: their room, and their sums over parts of a batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from zmqtrain.errors import ConfigError
from zmqtrain.metrics import AUC, Accuracy, ConfusionMatrix, MeanSquaredError
from zmqtrain.store.segment_layout import NAMES_NBYTES, SUMS
from zmqtrain.training.measuring import StepSums, measures_of

SCORES = np.array([[0.9, 0.1], [0.2, 0.8], [0.3, 0.7]])
LABELS = np.array([0, 1, 0])


def test_parts_of_a_batch_add_up_to_the_measures_of_the_whole() -> None:
    sums = StepSums([Accuracy(), MeanSquaredError(name="error")])
    sums.begin(0)
    labels = np.eye(2)[LABELS]
    for rows in (slice(0, 2), slice(2, 3)):
        given = SCORES[rows], (SCORES[rows], labels[rows])
        own = {"loss": 9.0, "mean": float(SCORES[rows, 0].mean())}
        sums.add(len(labels[rows]), own, lambda given=given: given)
    measures = measures_of([Accuracy(), MeanSquaredError(name="error")], sums.sums, 3)
    assert measures == {
        "mean": pytest.approx(SCORES[:, 0].mean()),
        "accuracy": 2 / 3,
        "error": pytest.approx(((SCORES - labels) ** 2).mean()),
    }
    sums.begin(0)
    assert sums.sums == {}


def test_metric_with_many_sums_or_no_row_of_them_is_left_out_and_the_others_stay() -> None:
    wide, metrics = ConfusionMatrix(2), [AUC(thresholds=9), Accuracy()]
    outputs = SCORES[:, 1]
    for metric in (wide, *metrics):
        sums = StepSums([metric, Accuracy(name="share")])
        for _ in range(2):
            sums.begin(0)
            sums.add(3, {}, lambda: (outputs, (outputs, LABELS)))
        names = set(measures_of([metric, Accuracy(name="share")], sums.sums, 3))
        assert names == {"share"} | ({"accuracy"} if metric == Accuracy() else set())


@pytest.mark.parametrize(
    ("means", "kept"),
    [
        ({f"m{i}": 1.0 for i in range(SUMS + 1)}, SUMS),
        ({"a" * 100: 1.0, "b" * 100: 1.0, "c" * 100: 1.0, "d": 1.0}, 3),
        ({"é" * (NAMES_NBYTES // 2): 1.0}, 1),
        ({"two\nlines": 1.0, "one": 1.0}, 1),
    ],
)
def test_measures_beyond_the_room_of_a_step_are_left_out(
    means: dict[str, float], kept: int
) -> None:
    sums = StepSums([])
    sums.begin(0)
    sums.add(2, means)
    assert len(sums.sums) == kept
    assert set(sums.sums.values()) == {2.0}


def test_measure_that_one_part_lacks_is_left_out() -> None:
    sums = StepSums([])
    sums.begin(0)
    sums.add(1, {"a": 1.0, "b": 1.0})
    sums.add(2, {"b": 4.0})
    assert sums.sums == {"b": 9.0}


def test_outputs_are_computed_for_metrics_alone_and_a_metric_that_raises_is_named() -> None:
    calls: list[bool] = []

    def outputs() -> Any:
        calls.append(True)
        return SCORES, (SCORES, LABELS[:2])

    for metrics, count in ([], 0), ([AUC()], 1):
        sums = StepSums(metrics)
        sums.begin(0)
        if count:
            with pytest.raises(ConfigError, match="AUC"):
                sums.add(3, {}, outputs)
        else:
            sums.add(3, {}, outputs)
        assert len(calls) == count
