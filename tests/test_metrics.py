"""Metrics against textbook formulas, and the law that sums of parts are the sum of the whole."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
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
    checked,
)
from zmqtrain.metrics.sums import Totals, check_sums

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
    (TopK(1), np.where(np.eye(CLASSES)[CLASS] == 1, np.inf, -np.inf), CLASS, 1.0),
    (Accuracy(), np.full((ROWS, CLASSES), np.nan), CLASS, 0.0),
    (Accuracy(), np.full(ROWS, np.nan), YES, 0.0),
    (Precision(class_id=0), np.full((ROWS, CLASSES), np.nan), CLASS, np.nan),
    (ConfusionMatrix(2), np.full((ROWS, 2), np.nan), YES, [[0, 0], [0, 0]]),
    (Recall(class_id=0), CHANCE[:, None], YES, np.mean(~SAID[YES == 0])),
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
@settings(max_examples=8)  # of each metric
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
    (MeanSquaredError(), VALUES.reshape(30, 2, 2), (VALUES, TARGETS.reshape(30, 4, 1))),
    (MeanAbsoluteError(), (VALUES, VALUES), (VALUES, TARGETS)),
    (Accuracy(), 10 * CHANCE, (CHANCE, YES)),
    (Precision(), -CHANCE[:, None], (CHANCE, YES)),
    (ConfusionMatrix(2), 2 * CHANCE, (CHANCE, YES)),
    (Accuracy(), SCORES, (SCORES, CLASS + 0.5)),
    (Accuracy(), SCORES, (SCORES, np.where(CLASS == 0, np.nan, CLASS))),
    (AUC(), CHANCE, (CHANCE, CHANCE)),
    (Accuracy(), SCORES, (SCORES, np.ones_like(ONE_HOT))),
    (Accuracy(axis=2), SCORES, (SCORES, CLASS)),
    (Accuracy(), SCORES, (SCORES, CLASS.astype(str))),
]


@pytest.mark.parametrize(("metric", "outputs", "batch"), WRONG)
def test_outputs_or_labels_that_a_metric_cannot_use_are_refused(
    metric: Any, outputs: Any, batch: Any
) -> None:
    with pytest.raises(ConfigError, match="expected"):
        metric.update(outputs, batch)


@given(
    seed=st.integers(0, 1000),
    shape=st.sampled_from([(), (3,), (2, 3)]),
    classes=st.integers(2, 4),
    is_second=st.booleans(),
    kind=st.sampled_from([np.int64, np.uint8, np.float32]),
    is_masked=st.booleans(),
)
def test_labels_of_any_layout_count_once_unless_they_are_ignored_or_masked(
    seed: int, shape: Any, classes: int, is_second: bool, kind: Any, is_masked: bool
) -> None:
    random = np.random.default_rng(seed)
    labels = random.integers(0, classes, (7, *shape))
    scores = random.random((7, *shape, classes))
    counts = labels != 1
    given = np.moveaxis(scores, -1, 1) if is_second else scores
    axis = 1 if is_second else -1
    if is_masked:
        masked = random.random(labels.shape) < 0.3
        counts &= ~masked
        expanded = np.broadcast_to(np.expand_dims(masked, axis), given.shape)
        given = np.ma.masked_array(given, expanded)
    metric = Accuracy(ignore_index=1, axis=axis)
    sums = metric.update(given, (scores, labels.astype(kind)))
    right = (scores.argmax(axis=-1) == labels) & counts
    assert sums.tolist() == [right.sum(), counts.sum()]


def test_axis_of_the_classes_follows_from_the_shape_of_the_labels() -> None:
    images, labels = RANDOM.random((5, 3, 4, 6)), RANDOM.integers(0, 3, (5, 4, 6))
    sums = Accuracy().update(images, (images, labels))
    assert sums[0] == np.count_nonzero(images.argmax(axis=1) == labels) and sums[1] == labels.size


@pytest.mark.parametrize("metric", [Accuracy(0), Precision(0), Recall(0)])
def test_logits_need_a_threshold_of_their_own(metric: Any) -> None:
    logits = np.log(CHANCE.clip(0.01, 0.99)) - np.log(1 - CHANCE.clip(0.01, 0.99))
    found = metric.update(logits[:, None], (logits, YES))
    assert found.tolist() == type(metric)().update(CHANCE, (CHANCE, YES)).tolist()


def test_area_of_scores_with_nan_is_nan() -> None:
    sums = AUC().update(np.where(YES == 1, np.nan, CHANCE), (CHANCE, YES))
    assert np.isnan(AUC().result(sums))


class Rating:
    """A model of users and items, whose labels are behind both."""

    labels_at = 2


BOUGHT = (np.arange(4), np.arange(4) + 100, np.array([1.0, 2.0, 3.0, 4.0], np.float32))


@pytest.mark.parametrize("more", [(), (np.ones(4, np.float32),)])
def test_labels_are_at_the_index_of_the_model(more: Any) -> None:
    totals = Totals([MeanAbsoluteError()])
    totals.add(BOUGHT[2] + 0.5, (*BOUGHT, *more), Rating())
    assert totals.results() == {"mean_absolute_error": 0.5}


@pytest.mark.parametrize("place", [None, 0, 3, "2"])
def test_labels_without_a_valid_index_are_refused(place: Any) -> None:
    model = Rating()
    model.labels_at = place
    with pytest.raises(ConfigError, match=r"MeanAbsoluteError.*needs labels.*expected"):
        Totals([MeanAbsoluteError()]).add(BOUGHT[2], BOUGHT, model)


def test_own_metric_gets_the_labels_last_without_the_weights() -> None:
    class Last:
        name = "last"

        def update(self, outputs: Any, batch: Any) -> Any:
            return np.array([batch[-1].sum()])

        def result(self, sums: Any) -> float:
            return float(sums[0])

    totals = Totals([Last()])
    totals.add(BOUGHT[2], (*BOUGHT, np.zeros(4, np.float32)), Rating())
    assert totals.results() == {"last": 10.0}


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


class Largest:
    """A measure that is no sum."""

    name = "largest"

    def update(self, outputs: Any, batch: Any) -> Any:
        return np.array([outputs.max()])

    def result(self, sums: Any) -> float:
        return float(sums[0])


def test_metric_that_returns_no_sums_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"returned \[.*expected sums"):
        check_sums(Largest(), SCORES, (SCORES, CLASS), None)
    check_sums(Accuracy(), SCORES, (SCORES, CLASS), None)
    check_sums(Largest(), SCORES[:1], (SCORES[:1], CLASS[:1]), None)


@pytest.mark.parametrize("metrics", [[Accuracy], ["accuracy"], [Accuracy(), Accuracy(0.3)]])
def test_list_of_metrics_with_a_mistake_is_refused(metrics: Any) -> None:
    with pytest.raises(ConfigError):
        checked(metrics)


def test_metrics_of_one_kind_differ_by_their_names() -> None:
    metrics = checked([TopK(2), TopK(3), Accuracy(), Accuracy(0.3, name="generous")])
    totals = Totals(metrics)
    totals.add(SCORES, (SCORES, CLASS))
    assert list(totals.results()) == ["top_2_accuracy", "top_3_accuracy", "accuracy", "generous"]
