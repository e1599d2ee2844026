from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from math import inf, nan
from typing import Any
from unittest.mock import patch

import prometheus_client
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from zmqtrain.observe.instruments import Counter, Family, Gauge, Histogram, Info
from zmqtrain.observe.metrics import DURATION_S, Metrics

TASKS = [("ps", 0), ("ps", 1), ("worker", 0), ("chief", 0)]
ORIGINALS: dict[Any, Any] = {
    CounterMetricFamily: prometheus_client.Counter,
    GaugeMetricFamily: prometheus_client.Gauge,
    HistogramMetricFamily: prometheus_client.Histogram,
    InfoMetricFamily: prometheus_client.Info,
}


class OriginalFamily:
    """A `Family` that is made of prometheus_client's own instruments."""

    def __init__(self, kind: Any, make: Any, name: str, text: str, label: str = "") -> None:
        buckets = {"buckets": make.args[0]} if kind is HistogramMetricFamily else {}
        labels = (label,) if label else ()
        self._metric = ORIGINALS[kind](name, text, labels, registry=None, **buckets)
        self.remove, self.describe = self._metric.remove, self._metric.describe

    def series(self, *values: object) -> Any:
        return self._metric.labels(*values) if values else self._metric

    def collect(self) -> Iterable[Metric]:
        for family in self._metric.collect():
            family.samples = [s for s in family.samples if not s.name.endswith("_created")]
            yield family


def original_metrics(role: str, index: int) -> Metrics:
    with patch("zmqtrain.observe.metrics.Family", OriginalFamily):
        return Metrics(role, index)


def exposition(metrics: Metrics, generate: Callable[[CollectorRegistry], bytes]) -> str:
    """Return what is exposed of the task itself; the figures of the process change by the hour."""
    text = generate(metrics.registry).decode()
    end = re.search("# HELP (process|python)_", text)
    assert end, "the figures of the process come last"
    return text[: end.start()]


AMOUNTS = st.integers(0, 1 << 62) | st.floats(0, allow_nan=False)
SECONDS = st.sampled_from([*DURATION_S, 0, -0.0, inf, nan]) | st.floats()
FACTS = st.dictionaries(st.sampled_from(["policy", "since"]), st.text(max_size=3))
WORKERS = st.integers(0, 2)
EVENTS = st.one_of(
    st.builds(lambda v: lambda m: m.bytes_sent.inc(v), AMOUNTS),
    st.builds(lambda v: lambda m: m.pushes.applied.inc(v), AMOUNTS),
    st.builds(lambda k: lambda m: m.lease_expirations[k].inc(), st.text(max_size=3)),
    st.builds(lambda v: lambda m: m.global_step.set(v), st.integers(0, 1 << 62)),
    st.builds(lambda v: lambda m: m.train_loss.set(v), st.floats()),
    st.builds(lambda k, v: lambda m: m.worker_step[k].set(v), WORKERS, st.integers(0, 9)),
    st.builds(lambda k: lambda m: m.worker_step.forget(k), WORKERS),
    st.builds(lambda v: lambda m: m.step_duration_seconds.observe(v), SECONDS),
    st.builds(lambda v: lambda m: m.apply_duration_seconds.observe(v), SECONDS),
    st.builds(lambda v: lambda m: m.phase_duration_seconds.wait.observe(v), SECONDS),
    st.builds(lambda v: lambda m: m.staleness_versions.observe(v), st.integers(0, 200)),
    st.builds(lambda v: lambda m: m.rpc_duration_seconds["Push"].observe(v), SECONDS),
    st.builds(lambda v: lambda m: m.policy.info(v), FACTS),
    st.builds(lambda v: lambda m: m.role_state.set(v), st.sampled_from(["joining", "finished"])),
)


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(TASKS), st.lists(EVENTS, max_size=30))
def test_same_events_are_exposed_as_prometheus_client_itself_exposes_them(
    task: tuple[str, int], events: list[Callable[[Metrics], None]]
) -> None:
    ours, originals = Metrics(*task), original_metrics(*task)
    for event in events:
        event(ours)
        event(originals)
    for generate in (generate_latest, generate_openmetrics):
        assert exposition(ours, generate) == exposition(originals, generate)


def test_gauge_takes_the_present_time() -> None:
    gauge = Gauge()
    with patch("time.time", lambda: 1234.5):
        gauge.set_to_current_time()
    assert gauge.exposed() == (1234.5,)


def test_info_replaces_all_that_was_known() -> None:
    info = Info()
    info.info({"policy": "hogwild", "since": "step 0"})
    info.info({"policy": "sync"})
    assert info.exposed() == ({"policy": "sync"},)


def test_counter_that_would_go_down_stays_and_tells_why() -> None:
    counter = Counter()
    counter.inc(5)
    with pytest.raises(ValueError, match="a counter never goes down; it was increased by -2"):
        counter.inc(-2)
    assert counter.exposed() == (5,)


@pytest.mark.parametrize(
    ("instrument", "update"),
    [
        (Counter(), lambda it: it.inc("1")),
        (Gauge(), lambda it: it.set(None)),
        (Gauge(), lambda it: it.set("fast")),
        (Histogram([1, 2]), lambda it: it.observe(None)),
    ],
)
def test_what_is_no_number_fails_at_the_update_and_not_in_a_scrape(
    instrument: Any, update: Callable[[Any], None]
) -> None:
    before = instrument.exposed()
    with pytest.raises((TypeError, ValueError)):
        update(instrument)
    assert instrument.exposed() == before


def test_name_that_is_declared_twice_is_refused() -> None:
    registry = CollectorRegistry()
    registry.register(Family(CounterMetricFamily, Counter, "pulls_total", "Pulls."))
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        registry.register(Family(GaugeMetricFamily, Gauge, "pulls", "Pulls."))


@pytest.mark.parametrize(
    "meddle",
    [lambda family: family.series(7), lambda family: family.remove(1)],
    ids=["comes", "goes"],
)
def test_series_that_comes_or_goes_during_a_scrape_does_not_break_it(
    meddle: Callable[[Family[Gauge]], object],
) -> None:
    class Meddler(Gauge):
        """Does while it is scraped what another thread might do then."""

        def exposed(self) -> tuple[float]:
            meddle(family)
            return super().exposed()

    family = Family(GaugeMetricFamily, Meddler, "worker_step", "Steps.", "worker")
    for worker in range(3):
        family.series(worker)
    [exposed] = family.collect()
    assert [sample.labels["worker"] for sample in exposed.samples] == ["0", "1", "2"]
