"""Products of matrices whose bits depend on no processor."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqtrain.optim.matrices import rows_by_rows


@given(
    st.integers(0, 9), st.integers(1, 9), st.integers(1, 3000), st.integers(0, 99), st.booleans()
)
def test_exact_product_is_the_same_in_any_order(
    rows: int, others: int, columns: int, seed: int, is_squared: bool
) -> None:
    """Processors differ in the order, or the grouping, in which they add products up."""
    random = np.random.default_rng(seed)

    def drawn(count: int) -> np.ndarray:
        scales = 2.0 ** random.integers(-40, 40, (count, 1))
        return (random.standard_normal((count, columns)) * scales).astype(np.float32)

    a = drawn(rows)
    b = a if is_squared else drawn(others)
    found = rows_by_rows(a, b, True)
    order = random.permutation(columns)
    a_shuffled = a[:, order]
    b_shuffled = a_shuffled if is_squared else b[:, order]
    again = rows_by_rows(a_shuffled, b_shuffled, True)
    assert (found.dtype, found.tobytes()) == (np.float32, again.tobytes())
    lengths = [np.linalg.norm(each.astype(np.float64), axis=1) for each in (a, b)]
    wrong = np.abs(found - a.astype(np.float64) @ b.astype(np.float64).T)
    assert (wrong <= np.outer(*lengths) * 2.0**-14).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_product_of_what_is_not_finite_is_not_finite(bad: float) -> None:
    with np.errstate(all="ignore"):
        found = rows_by_rows(np.array([[bad, 1]], np.float32), np.eye(2, dtype="f4"), True)
    assert not np.isfinite(found).all()
