"""Figures of a run."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from zmqtrain.coordination.statistics import MAX_TRACKED, Staleness, Throughput


def summary_of(values: list[int]) -> dict[str, float]:
    staleness = Staleness()
    for value in values:
        staleness.observe(value)
    return staleness.summary()


def test_staleness_of_nothing_is_zero() -> None:
    assert Staleness().summary() == {"mean": 0.0, "p50": 0.0, "p99": 0.0, "max": 0.0}


@settings(max_examples=100)
@given(
    values=st.integers(1, 300).flatmap(
        lambda n: st.lists(st.integers(0, 40), min_size=n, max_size=n)
    )
)
@example(values=list(range(100)))
@example(values=list(range(700)))
def test_staleness_is_counted_exactly(values: list[int]) -> None:
    summary = summary_of(values)
    assert summary["mean"] == pytest.approx(np.mean(values))
    assert summary["max"] == max(values)
    for name, share in (("p50", Fraction(1, 2)), ("p99", Fraction(99, 100))):
        rank = -(-len(values) * share.numerator // share.denominator)
        assert summary[name] == sorted(values)[rank - 1]


def test_staleness_beyond_the_limit_counts_as_the_limit() -> None:
    assert summary_of([MAX_TRACKED + 1000])["max"] == MAX_TRACKED


def test_throughput_of_nothing_is_zero() -> None:
    throughput = Throughput()
    assert (throughput.seconds, throughput.steps_per_second) == (0.0, 0.0)
    throughput.observe(step=1, now=100.0)
    assert (throughput.seconds, throughput.steps_per_second) == (0.0, 0.0)


def test_throughput_leaves_the_start_up_out() -> None:
    throughput = Throughput()
    for step, now in ((501, 1000.0), (502, 1000.5), (541, 1010.0)):
        throughput.observe(step, now)
    assert throughput.seconds == 10.0
    assert throughput.steps_per_second == 4.0
    assert throughput.idle_s(1012.5) == 2.5
    assert Throughput().idle_s(1012.5) == 0.0
