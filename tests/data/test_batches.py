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


@given(plans, st.integers(0, 50), st.booleans())
def test_batches_follow_the_permutations_of_the_passes(
    plan: BatchPlan, number: int, exact: bool
) -> None:
    """The permutation of a pass is seeded with the job's seed and the number of the pass."""
    plan = replace(plan, exact=exact)
    numbers = range(number // plan.of_pass + 1 if exact else plan.passes(number)[-1] + 1)
    orders = [
        np.random.Generator(np.random.PCG64([plan.seed, each])).permutation(plan.examples)
        for each in numbers
    ]
    start = number * plan.batch_size
    order = np.concatenate(orders)
    if exact:
        start, order = number % plan.of_pass * plan.batch_size, orders[-1]
    batch = plan.indices(number)
    assert batch.dtype == np.int64
    np.testing.assert_array_equal(batch, order[start : start + plan.batch_size])
    assert exact or len(batch) == plan.batch_size


@given(plans, st.integers(0, 50), st.booleans())
def test_rows_of_a_batch_are_known_without_its_indices(
    plan: BatchPlan, number: int, exact: bool
) -> None:
    plan = replace(plan, exact=exact)
    assert plan.rows(number) == len(plan.indices(number)) == len(plan.passes(number))


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
