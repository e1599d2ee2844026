"""Examples that go through functions, with random numbers that can be repeated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from zmqtrain.data import ArrayDataset, BatchPlan, Mapped, Parallel, Prefetcher
from zmqtrain.data.subset import Subset
from zmqtrain.errors import DataError

ROWS = 12
EXAMPLES = ArrayDataset(np.arange(ROWS, dtype=np.float32), np.arange(ROWS))


def noisy(x: Any, y: Any, rng: np.random.Generator) -> Any:
    return x + rng.normal(), y


def batch_of(dataset: Any, seed: int, number: int, size: int = 5) -> Any:
    """Return the batch of this number, as a worker's prefetcher makes it."""
    prefetcher = Prefetcher(dataset, BatchPlan(ROWS, size, seed))
    try:
        return prefetcher.take(number)
    finally:
        prefetcher.close()


def test_repeated_lease_is_augmented_alike_wherever_it_is_computed() -> None:
    for number in range(4):
        first = batch_of(Mapped(EXAMPLES, noisy), 3, number)
        for other in (Mapped(EXAMPLES, noisy), Parallel(Mapped(EXAMPLES, noisy), 2)):
            np.testing.assert_array_equal(batch_of(other, 3, number)[0], first[0])


def test_augmentation_depends_on_seed_pass_and_example_and_not_on_the_batch() -> None:
    def noise(seed: int, pass_number: int, size: int) -> Any:
        """The noise of each example in one pass."""
        found = np.full(ROWS, np.nan)
        per_pass = ROWS // size
        for number in range(pass_number * per_pass, (pass_number + 1) * per_pass):
            x, y = batch_of(Mapped(EXAMPLES, noisy), seed, number, size)
            found[y] = x - y
        return found

    one = noise(0, 0, 4)
    assert len(np.unique(one)) == ROWS
    np.testing.assert_array_equal(noise(0, 0, 6), one)
    assert not np.isin(noise(0, 1, 4), one).any()
    assert not np.isin(noise(1, 0, 4), one).any()


def test_augmentation_depends_on_the_example_behind_a_subset() -> None:
    whole = Mapped(EXAMPLES, noisy)
    part = Subset(whole, np.array([7, 3]))
    passes = np.array([2, 5])
    np.testing.assert_array_equal(
        part.take_seeded(np.array([1, 0]), 9, passes)[0],
        whole.take_seeded(np.array([3, 7]), 9, passes)[0],
    )


def test_functions_follow_one_another() -> None:
    twice = Mapped(Mapped(EXAMPLES, noisy), lambda x, y: (2 * x, y, y + 1))
    passes = np.arange(3)
    x, y, z = twice.take_seeded(np.arange(3), 1, passes)
    np.testing.assert_array_equal(
        x, 2 * Mapped(EXAMPLES, noisy).take_seeded(np.arange(3), 1, passes)[0]
    )
    np.testing.assert_array_equal(z, y + 1)


def test_function_may_return_a_single_array() -> None:
    (batch,) = Mapped(EXAMPLES, lambda x, y: np.full(3, x)).take(np.array([4, 1]))
    np.testing.assert_array_equal(batch, [[4, 4, 4], [1, 1, 1]])


def test_function_that_raises_is_a_data_error_with_the_example() -> None:
    def broken(x: Any, y: Any) -> Any:
        raise KeyError("no such class")

    with pytest.raises(DataError, match=r"test_mapped\.py, line \d+: KeyError.*example 7"):
        Mapped(EXAMPLES, broken).take(np.array([7]))
