from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqtrain.data import BatchPlan
from zmqtrain.errors import ConfigError, DataError

plans = st.builds(
    BatchPlan,
    examples=st.integers(1, 40),
    batch_size=st.integers(1, 90),
    seed=st.integers(0, 2**64),
)


def positions(plan: BatchPlan, passes: int) -> np.ndarray:
    """The examples of the first passes, batch after batch."""
    batches = -(-passes * plan.examples // plan.batch_size)
    return np.concatenate([plan.indices(number) for number in range(batches)])


@given(plans, st.integers(1, 4))
def test_each_pass_holds_each_example_exactly_once(plan: BatchPlan, passes: int) -> None:
    order = positions(plan, passes)[: passes * plan.examples].reshape(passes, plan.examples)
    np.testing.assert_array_equal(
        np.sort(order, axis=1), np.tile(np.arange(plan.examples), (passes, 1))
    )


@given(plans, st.integers(0, 50))
def test_every_batch_is_full(plan: BatchPlan, number: int) -> None:
    batch = plan.indices(number)
    assert batch.dtype == np.int64
    assert batch.shape == (plan.batch_size,)


@given(plans, st.integers(0, 50), st.booleans())
def test_rows_of_a_batch_are_known_without_its_indices(
    plan: BatchPlan, number: int, exact: bool
) -> None:
    plan = replace(plan, exact=exact)
    assert plan.rows(number) == len(plan.indices(number)) == len(plan.passes(number))


@given(plans, st.lists(st.integers(0, 50), max_size=8))
def test_batch_depends_on_its_number_alone(plan: BatchPlan, numbers: list[int]) -> None:
    twin = BatchPlan(plan.examples, plan.batch_size, plan.seed)
    forwards = {number: plan.indices(number) for number in numbers}
    for number in reversed(numbers):
        np.testing.assert_array_equal(twin.indices(number), forwards[number])


@given(plans, st.integers(1, 90))
def test_batch_size_does_not_change_the_order_of_the_examples(
    plan: BatchPlan, other_size: int
) -> None:
    other = BatchPlan(plan.examples, other_size, plan.seed)
    both = 2 * plan.examples
    np.testing.assert_array_equal(positions(plan, 2)[:both], positions(other, 2)[:both])


def test_pass_order_is_the_permutation_seeded_with_job_seed_and_pass_number() -> None:
    plan = BatchPlan(examples=10, batch_size=4, seed=3)
    passes = [np.random.Generator(np.random.PCG64([3, p])).permutation(10) for p in range(2)]
    np.testing.assert_array_equal(plan.indices(0), passes[0][:4])
    np.testing.assert_array_equal(plan.indices(2), [*passes[0][8:], *passes[1][:2]])


def test_order_differs_from_pass_to_pass_and_from_seed_to_seed() -> None:
    plan, other = BatchPlan(100, 100, 0), BatchPlan(100, 100, 1)
    assert not np.array_equal(plan.indices(0), plan.indices(1))
    assert not np.array_equal(plan.indices(0), other.indices(0))


def test_writing_into_a_batch_does_not_change_the_plan() -> None:
    plan = BatchPlan(examples=10, batch_size=10, seed=0)
    before = plan.indices(0).copy()
    plan.indices(0)[:] = -1
    np.testing.assert_array_equal(plan.indices(0), before)


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        ((0, 5, 0), DataError, "the training set has 0 examples; expected at least 1"),
        ((5, 0, 0), ConfigError, "batch_size is 0; expected at least 1; correct it in the job"),
        ((5, 5, -1), ConfigError, "seed is -1; expected an int of at least 0"),
    ],
)
def test_plan_that_cannot_be_is_refused(
    sizes: tuple[int, int, int], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        BatchPlan(*sizes)
