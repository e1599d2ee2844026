from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from zmqtrain.data import BatchPlan, Prefetcher
from zmqtrain.data.subset import Subset

PLAN = BatchPlan(examples=20, batch_size=4, seed=0)


class Recorder:
    """A data set of its own row numbers that notes which thread reads, and can be held up."""

    def __init__(self) -> None:
        self.may_read = threading.Event()
        self.may_read.set()
        self.is_reading = threading.Event()
        self.threads: list[str] = []
        self.readers = 0
        self.most_readers = 0
        self.failure: Exception | None = None

    def __len__(self) -> int:
        return PLAN.examples

    def take(self, indices: Any) -> tuple[Any, ...]:
        self.readers += 1
        self.most_readers = max(self.most_readers, self.readers)
        self.threads.append(threading.current_thread().name)
        self.is_reading.set()
        self.may_read.wait()
        self.readers -= 1
        if self.failure is not None:
            raise self.failure
        return (indices,)


@pytest.fixture
def dataset() -> Recorder:
    return Recorder()


@pytest.fixture
def prefetcher(dataset: Recorder) -> Iterator[Prefetcher]:
    with closing(Prefetcher(dataset, PLAN, limit=3, quick_s=0)) as prefetcher:
        yield prefetcher
        dataset.may_read.set()


def hold_up(dataset: Recorder, prefetcher: Prefetcher, number: int) -> None:
    """Leave the background thread in the middle of reading batch ``number``."""
    dataset.may_read.clear()
    assert prefetcher.prepare(number)
    assert dataset.is_reading.wait(10)


def test_batches_are_those_of_the_plan_prepared_or_not(
    dataset: Recorder, prefetcher: Prefetcher
) -> None:
    for number in (2, 0, 5, 5):
        assert prefetcher.prepare(number)
    for number in (0, 1, 5, 2):
        np.testing.assert_array_equal(prefetcher.take(number)[0], PLAN.indices(number))
    assert len(dataset.threads) == 4


def test_unprepared_batch_is_read_in_the_calling_thread(
    dataset: Recorder, prefetcher: Prefetcher
) -> None:
    prefetcher.take(0)
    assert dataset.threads == [threading.current_thread().name]


def test_data_that_is_read_in_turn_is_not_read_ahead(dataset: Recorder) -> None:
    dataset.may_be_read_ahead = False  # type: ignore[attr-defined]
    assert not Prefetcher(Subset(dataset, PLAN.indices(0)), PLAN).prepare(0)


@pytest.mark.parametrize(
    ("prepared", "taken", "readers"),
    [([], 0, ["prefetch"]), ([1], 1, ["prefetch", "prefetch"]), ([], 1, ["prefetch", "taker"])],
    ids=["in progress", "queued behind it", "not prepared"],
)
def test_batch_is_waited_for_and_no_two_are_read_at_once(
    prepared: list[int], taken: int, readers: list[str], dataset: Recorder, prefetcher: Prefetcher
) -> None:
    hold_up(dataset, prefetcher, 0)
    for number in prepared:
        assert prefetcher.prepare(number)
    with ThreadPoolExecutor(1, "taker") as threads:
        batch = threads.submit(prefetcher.take, taken)
        dataset.may_read.set()
        np.testing.assert_array_equal(batch.result(10)[0], PLAN.indices(taken))
    assert [name.split("_")[0] for name in dataset.threads] == readers
    assert dataset.most_readers == 1


def test_no_more_than_the_limit_is_held(dataset: Recorder, prefetcher: Prefetcher) -> None:
    assert [prefetcher.prepare(number) for number in (0, 1, 2, 3)] == [True, True, True, False]
    assert prefetcher.prepare(1)
    prefetcher.take(1)
    assert prefetcher.prepare(3)


def test_forgotten_batches_make_room_and_are_not_read(
    dataset: Recorder, prefetcher: Prefetcher
) -> None:
    hold_up(dataset, prefetcher, 0)
    prefetcher.prepare(1)
    prefetcher.prepare(2)
    prefetcher.forget([0, 1, 2, 9])
    assert prefetcher.prepare(3)
    dataset.may_read.set()
    for number in (3, 1):  # a forgotten batch can be taken after all
        np.testing.assert_array_equal(prefetcher.take(number)[0], PLAN.indices(number))
    prefetcher.close()
    assert len(dataset.threads) == 3


@pytest.mark.parametrize("prepared", [True, False])
def test_failure_to_read_is_raised_where_the_batch_is_taken(
    prepared: bool, dataset: Recorder, prefetcher: Prefetcher
) -> None:
    dataset.failure = OSError("disk gone")
    if prepared:
        assert prefetcher.prepare(0)
    with pytest.raises(OSError, match="disk gone"):
        prefetcher.take(0)
    dataset.failure = None
    np.testing.assert_array_equal(prefetcher.take(0)[0], PLAN.indices(0))


def test_closed_prefetcher_ends_its_thread_and_reads_in_the_callers(
    dataset: Recorder, prefetcher: Prefetcher
) -> None:
    prefetcher.prepare(0)
    prefetcher.close()
    prefetcher.close()
    assert not any(thread.name.startswith("prefetch") for thread in threading.enumerate())
    assert not prefetcher.prepare(1)
    np.testing.assert_array_equal(prefetcher.take(1)[0], PLAN.indices(1))
    assert dataset.threads[-1] == threading.current_thread().name


def test_batches_are_read_ahead_for_as_long_as_a_slow_one_is_remembered() -> None:
    now = read_s = 0.0

    class Slow(Recorder):
        def take(self, indices: Any) -> Any:
            nonlocal now
            now += read_s
            return (indices,)

    def prepared_after(seconds: float) -> bool:
        nonlocal read_s
        read_s = seconds
        prefetcher.take(0)
        prefetcher.forget([1])
        return prefetcher.prepare(1)

    with closing(Prefetcher(Slow(), PLAN, clock=lambda: now)) as prefetcher:
        assert prefetcher.prepare(1)  # how long it takes is not known yet
        assert prepared_after(1.0)
        assert all(prepared_after(0.0) for _ in range(100))
        assert not all(prepared_after(0.0) for _ in range(1000))
        assert not prepared_after(0.0)
        assert prepared_after(1.0)
