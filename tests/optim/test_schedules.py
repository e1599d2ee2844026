"""Schedules against values worked out by hand from their formulas."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqtrain.errors import ConfigError
from zmqtrain.optim import (
    Cosine,
    Exponential,
    InverseTime,
    NaturalExponential,
    Piecewise,
    Polynomial,
    Schedule,
    Warmup,
)
from zmqtrain.optim.schedules import rate_at

HAND_VALUES = [
    (Exponential(0.1, 10, 0.5), {0: 0.1, 5: 0.1 * math.sqrt(0.5), 10: 0.05, 30: 0.0125}),
    (Exponential(0.1, 10, 0.5, staircase=True), {0: 0.1, 9: 0.1, 10: 0.05, 19: 0.05, 20: 0.025}),
    (NaturalExponential(2.0, 4, 0.5), {0: 2.0, 4: 2 * math.exp(-0.5), 6: 2 * math.exp(-0.75)}),
    (NaturalExponential(2.0, 4, 0.5, staircase=True), {3: 2.0, 4: 2 * math.exp(-0.5)}),
    (InverseTime(1.0, 10, 0.5), {0: 1.0, 5: 0.8, 10: 1 / 1.5, 20: 0.5}),
    (InverseTime(1.0, 10, 0.5, staircase=True), {9: 1.0, 10: 1 / 1.5, 19: 1 / 1.5, 20: 0.5}),
    (Piecewise([100, 200], [1.0, 0.5, 0.1]), {0: 1.0, 100: 1.0, 101: 0.5, 200: 0.5, 201: 0.1}),
    (Piecewise((), (0.7,)), {0: 0.7, 1000: 0.7}),
    (Piecewise((5,), (1, 0)), {5: 1.0, 6: 0.0}),
    (Polynomial(0.1, 100), {0: 0.1, 50: 0.05005, 100: 1e-4, 5000: 1e-4}),
    (Polynomial(1.0, 10, end=0.2, power=2.0), {0: 1.0, 5: 0.4, 10: 0.2, 11: 0.2}),
    (
        Polynomial(1.0, 10, end=0.0, cycle=True),
        # ceil(s/D) cycles: 1 at 0 and at 10, 2 from 11 on.
        {0: 1.0, 5: 0.5, 10: 0.0, 11: 9 / 20, 15: 0.25, 20: 0.0, 21: 9 / 30},
    ),
    (Cosine(2.0, 100), {0: 2.0, 25: 1 + math.sqrt(0.5), 50: 1.0, 100: 0.0, 101: 0.0}),
    (Cosine(2.0, 100, alpha=0.1), {0: 2.0, 50: 1.1, 100: 0.2, 10**6: 0.2}),
]

RISING: list[tuple[Schedule, dict[int, float]]] = [
    (Warmup(0.2, 4), {0: 0.0, 1: 0.05, 4: 0.2, 99: 0.2}),
    (Warmup(Cosine(2.0, 100), 4, start=1.0), {0: 1.0, 2: 1.5, 4: 2.0, 54: 1.0, 104: 0.0}),
]


@pytest.mark.parametrize(("schedule", "row"), HAND_VALUES + RISING)
def test_schedule_at_a_step_has_the_hand_computed_rate(
    schedule: Schedule, row: dict[int, float]
) -> None:
    rates = {step: schedule(step) for step in row}
    assert {type(rate) for rate in rates.values()} == {float}
    assert rates == pytest.approx(row, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("schedule", [schedule for schedule, _ in HAND_VALUES + RISING], ids=repr)
def test_schedule_written_as_text_and_read_back_is_equal(schedule: Schedule) -> None:
    assert eval(repr(schedule)) == schedule
    assert hash(eval(repr(schedule))) == hash(schedule)


@given(step=st.integers(0, 10**7), index=st.integers(0, len(HAND_VALUES) - 1))
def test_schedule_at_any_step_stays_within_its_first_and_last_rate(step: int, index: int) -> None:
    schedule = HAND_VALUES[index][0]
    assert 0 <= schedule(step) <= schedule(0)


def test_piecewise_of_a_list_changed_later_keeps_its_values() -> None:
    values = [1.0, 0.5]
    schedule = Piecewise([10], values)
    values[0] = 7.0
    assert schedule(0) == 1.0


@pytest.mark.parametrize("rate", [math.nan, math.inf, -1e-9, None])
def test_schedule_that_gives_no_rate_is_refused_with_the_step(rate: object) -> None:
    with pytest.raises(ConfigError, match=rf"the learning rate is {rate} at step 12; expected"):
        rate_at(lambda step: rate, 12)


def test_piecewise_needs_one_value_more_than_boundaries() -> None:
    with pytest.raises(ConfigError, match="2 boundaries and 2 values; expected one value"):
        Piecewise((1, 2), (0.1, 0.2))
