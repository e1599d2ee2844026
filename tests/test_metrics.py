"""Metrics against textbook formulas, and the law that sums of parts are the sum of the whole."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqtrain.errors import ConfigError
from zmqtrain.metrics import (
    AUC,
    Accuracy,
    ConfusionMatrix,
    MeanAbsoluteError,
    MeanSquaredError,
    Precision,
    Recall,
    TopK,
    Totals,
    checked,
)

ROWS, CLASSES = 60, 4
RANDOM = np.random.default_rng(1)
SCORES = RANDOM.random((ROWS, CLASSES)).astype(np.float32)
SCORES[:10] = SCORES[:10].round(1)  # some are equal
CLASS = RANDOM.integers(0, CLASSES, ROWS)
ONE_HOT = np.eye(CLASSES, dtype=np.float32)[CLASS]
YES = (RANDOM.random(ROWS) < 0.4).astype(np.int64)
CHANCE = np.clip(RANDOM.normal(0.4 + 0.2 * YES, 0.2), 0, 1).astype(np.float32)
SAID = CHANCE > 0.5
TARGETS = RANDOM.normal(size=(ROWS, 2))
VALUES = TARGETS + RANDOM.normal(size=(ROWS, 2))

BEST = SCORES.argmax(axis=1)
MATRIX = [
    [sum((CLASS == row) & (BEST == column)) for column in range(CLASSES)] for row in range(CLASSES)
]
TRUE, FALSE, MISSED = sum(SAID & (YES == 1)), sum(SAID & (YES == 0)), sum(~SAID & (YES == 1))
AMONG_TWO = np.mean([CLASS[i] in np.argsort(-SCORES[i], kind="stable")[:2] for i in range(ROWS)])


def area(scores: Any, yes: Any, thresholds: int) -> float:
    """Return the area under the ROC curve as its definition says, point by point."""
    places = [-1.0, *(i / (thresholds - 1) for i in range(1, thresholds - 1)), 2.0]
    points = [
        (np.mean(scores[yes == 0] > place), np.mean(scores[yes == 1] > place)) for place in places
    ]
    return sum((x1 - x0) * (y0 + y1) / 2 for (x1, y1), (x0, y0) in pairwise(points))


CASES: list[tuple[Any, Any, Any, Any]] = [
    (Accuracy(), SCORES, CLASS, np.mean(BEST == CLASS)),
    (Accuracy(), SCORES, CLASS[:, None], np.mean(BEST == CLASS)),
    (Accuracy(), SCORES, ONE_HOT, np.mean(BEST == CLASS)),
    (Accuracy(), CHANCE, YES, np.mean(SAID == YES)),
    (Accuracy(), CHANCE[:, None], YES, np.mean(SAID == YES)),
    (Accuracy(0.3), CHANCE[:, None], YES[:, None], np.mean((CHANCE > 0.3) == YES)),
    (Accuracy(), SCORES.reshape(15, 4, CLASSES), CLASS.reshape(15, 4), np.mean(BEST == CLASS)),
    (TopK(1), SCORES, CLASS, np.mean(BEST == CLASS)),
    (TopK(2), SCORES, ONE_HOT, AMONG_TWO),
    (TopK(CLASSES), SCORES, CLASS, 1.0),
    (TopK(1), np.full((ROWS, CLASSES), np.nan), CLASS, 0.0),
    (Precision(), CHANCE, YES, TRUE / (TRUE + FALSE)),
    (Recall(), CHANCE[:, None], YES, TRUE / (TRUE + MISSED)),
    (Precision(class_id=2), SCORES, CLASS, MATRIX[2][2] / sum(row[2] for row in MATRIX)),
    (Recall(class_id=2), SCORES, ONE_HOT, MATRIX[2][2] / sum(MATRIX[2])),
    (Precision(), np.zeros(ROWS), YES, np.nan),
    (AUC(), CHANCE, YES, area(CHANCE, YES, 200)),
    (AUC(7), CHANCE, YES, area(CHANCE, YES, 7)),
    (AUC(from_logits=True), np.log(0.7) - np.log(0.3) + 0 * CHANCE, YES, 0.5),
    (AUC(), YES.astype(float), YES, 1.0),
    (AUC(), 1.0 - YES, YES, 0.0),
    (AUC(), CHANCE, np.zeros(ROWS), np.nan),
    (ConfusionMatrix(CLASSES), SCORES, CLASS, MATRIX),
    (ConfusionMatrix(2), CHANCE, YES,
     [[sum(~SAID & (YES == 0)), FALSE], [MISSED, TRUE]]),
    (MeanSquaredError(), VALUES, TARGETS, np.mean((VALUES - TARGETS) ** 2)),
    (MeanSquaredError(), VALUES[:, :1], TARGETS[:, 0], np.mean((VALUES - TARGETS)[:, 0] ** 2)),
    (MeanAbsoluteError(), VALUES, TARGETS, np.mean(abs(VALUES - TARGETS))),
]  # fmt: skip


@pytest.mark.parametrize(("metric", "outputs", "labels", "expected"), CASES)
def test_metric_has_the_value_of_its_formula(
    metric: Any, outputs: Any, labels: Any, expected: Any
) -> None:
    sums = metric.update(outputs, (np.zeros(len(labels)), labels))
    assert metric.result(sums) == pytest.approx(np.array(expected), nan_ok=True)


@pytest.mark.parametrize(("metric", "outputs", "labels", "expected"), CASES)
@given(cuts=st.lists(st.integers(0, 14), max_size=4))
def test_any_partition_gives_the_value_of_the_whole(
    metric: Any, outputs: Any, labels: Any, expected: Any, cuts: list[int]
) -> None:
    borders = [0, *sorted(cuts), len(labels)]
    totals = Totals([metric])
    for start, stop in pairwise(borders):
        part = labels[start:stop]
        totals.add(outputs[start:stop], (np.zeros(len(part)), part))
    assert totals.results()[metric.name] == pytest.approx(np.array(expected), nan_ok=True)


WRONG: list[tuple[Any, Any, tuple[Any, ...]]] = [
    (Accuracy(), SCORES, (SCORES, CLASS[:-1])),
    (Accuracy(), SCORES, (SCORES, CLASS + 1)),
    (Accuracy(), SCORES, (SCORES, CLASS - 1)),
    (Accuracy(), SCORES, (SCORES, ONE_HOT[:, :-1])),
    (Accuracy(), SCORES, (SCORES,)),
    (Accuracy(), 0.5, (SCORES, CLASS)),
    (Precision(), SCORES, (SCORES, CLASS)),
    (Precision(), CHANCE, (CHANCE, CLASS)),
    (Recall(class_id=CLASSES), SCORES, (SCORES, CLASS)),
    (AUC(), 10 * CHANCE, (CHANCE, YES)),
    (ConfusionMatrix(3), SCORES, (SCORES, CLASS)),
    (MeanSquaredError(), VALUES, (VALUES, TARGETS[:, 0])),
]


@pytest.mark.parametrize(("metric", "outputs", "batch"), WRONG)
def test_outputs_or_labels_that_a_metric_cannot_use_are_refused(
    metric: Any, outputs: Any, batch: Any
) -> None:
    with pytest.raises(ConfigError, match="expected"):
        metric.update(outputs, batch)


def test_sums_of_another_shape_than_before_are_refused() -> None:
    class Each:
        name = "each"

        def update(self, outputs: Any, batch: Any) -> Any:
            return np.zeros(len(outputs))

        def result(self, sums: Any) -> float:
            return float(sums.sum())

    totals = Totals([Each()])
    totals.add(SCORES, (SCORES, CLASS))
    with pytest.raises(ConfigError, match="sums over its examples"):
        totals.add(SCORES[:1], (SCORES[:1], CLASS[:1]))


@pytest.mark.parametrize("metrics", [[Accuracy], ["accuracy"], [Accuracy(), Accuracy(0.3)]])
def test_list_of_metrics_with_a_mistake_is_refused(metrics: Any) -> None:
    with pytest.raises(ConfigError):
        checked(metrics)


def test_two_metrics_of_a_kind_are_told_apart_by_their_names() -> None:
    metrics = checked([TopK(2), TopK(3), Accuracy(), Accuracy(0.3, name="generous")])
    totals = Totals(metrics)
    totals.add(SCORES, (SCORES, CLASS))
    assert list(totals.results()) == ["top_2_accuracy", "top_3_accuracy", "accuracy", "generous"]
