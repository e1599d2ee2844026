"""Counters, gauges, histograms and infos that cost next to nothing to update.

A worker's step of 150 us updates two dozen of them. Those of prometheus_client take a lock for each
update and walk over the buckets; these take none, and all that can wait is done by the scrape.

Updates come from the event loop and, rarely, from another thread; scrapes from threads of the
server. At worst, of two threads that update one series at once, one undoes what the other added
meanwhile, and a scrape sees an observation in the buckets that is not in the sum yet. A scrape
never fails: what it reads has a fixed size, but for the table of series, which a lock guards.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from threading import Lock
from typing import Any, Generic, Protocol, TypeVar

from prometheus_client import Metric


class Counter:
    """Adds up; never goes down."""

    __slots__ = ("_value",)

    def __init__(self) -> None:
        self._value = 0.0

    def inc(self, amount: float = 1) -> None:
        """Add ``amount``.

        Raises:
            ValueError: it is negative.
        """
        if amount < 0:
            raise ValueError(f"a counter never goes down; it was increased by {amount}")
        self._value += amount

    def exposed(self) -> tuple[float]:
        return (self._value,)


class Gauge:
    """What holds now."""

    __slots__ = ("_value",)

    def __init__(self) -> None:
        self._value = 0.0

    def set(self, value: float) -> None:
        # What is no number must fail here, where the traceback tells who set it, not in a scrape.
        self._value = float(value)

    def set_to_current_time(self) -> None:
        """Set to the present Unix time, in seconds."""
        self._value = time.time()

    def exposed(self) -> tuple[float]:
        return (self._value,)


class Histogram:
    """Counts observations by size; a bucket holds those that are at most its bound.

    NaN is in no bucket, not even in that of +Inf, and turns the sum into NaN: prometheus_client
    has it so.
    """

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Iterable[float]) -> None:
        """Make a bucket for each of the rising, finite ``bounds``, and one without a bound."""
        self._bounds = tuple(map(float, bounds))
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        if value == value:
            self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def exposed(self) -> tuple[list[tuple[str, int]], float]:
        """Return each bound, as text, with the observations up to it; and the sum."""
        bounds = (*map(str, self._bounds), "+Inf")
        return list(zip(bounds, accumulate(self._counts), strict=True)), self._sum


class Info:
    """Facts in words."""

    __slots__ = ("_facts",)

    def __init__(self) -> None:
        self._facts: dict[str, str] = {}

    def info(self, facts: Mapping[str, str]) -> None:
        """Replace what was known."""
        self._facts = dict(facts)

    def exposed(self) -> tuple[dict[str, str]]:
        return (self._facts,)


class Instrument(Protocol):
    """What a series is kept in."""

    def exposed(self) -> tuple[Any, ...]:
        """Return what ``add_metric`` of the prometheus_client family takes after the labels."""


T = TypeVar("T", bound=Instrument)


class Family(Generic[T]):
    """A metric under one name: a single series, or one for each value of its label.

    It is a collector, which prometheus_client's registries ask at each scrape.
    """

    def __init__(
        self, kind: Callable[..., Any], make: Callable[[], T], name: str, text: str, label: str = ""
    ) -> None:
        """Expose what ``make`` makes as ``kind``, one of prometheus_client's metric families."""
        self._kind = kind
        self._make = make
        self._name = name
        self._text = text
        self._labels = (label,) if label else ()
        self._series: dict[tuple[str, ...], T] = {}
        self._lock = Lock()

    def series(self, *values: object) -> T:
        """Return the series of that label value, of none if the metric has no label."""
        key = tuple(map(str, values))
        with self._lock:
            if key not in self._series:
                self._series[key] = self._make()
            return self._series[key]

    def remove(self, value: object) -> None:
        """Stop exposing the series of that label value."""
        with self._lock:
            self._series.pop((str(value),), None)

    def describe(self) -> Iterable[Metric]:
        """Yield the family without its series; a registry takes the names from it."""
        yield self._empty()

    def collect(self) -> Iterable[Metric]:
        """Yield the family as it is now; safe from any thread."""
        with self._lock:
            series = self._series.copy()
        family = self._empty()
        for values, instrument in series.items():
            family.add_metric(values, *instrument.exposed())
        yield family

    def _empty(self) -> Any:
        return self._kind(self._name, self._text, labels=self._labels)
