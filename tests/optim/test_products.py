"""Products of matrices whose bits depend on no processor."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from zmqtrain.optim.matrices import rows_by_rows


@given(st.integers(0, 9), st.integers(1, 3000), st.integers(0, 99), st.booleans())
def test_exact_product_is_the_same_in_any_order(
    count: int, columns: int, seed: int, is_squared: bool
) -> None:
    """Processors differ in the order, or the grouping, in which they add products up."""
    random = np.random.default_rng(seed)
    scales = 2.0 ** random.integers(-40, 40, (2, count, 1))
    a, b = (random.standard_normal((2, count, columns)) * scales).astype(np.float32)
    b, order = a if is_squared else b, random.permutation(columns)
    shuffled = a[:, order]
    found = rows_by_rows(a, b, True)
    again = rows_by_rows(shuffled, shuffled if is_squared else b[:, order], True)
    assert (found.dtype, found.tobytes()) == (np.float32, again.tobytes())
    a, b = a.astype(np.float64), b.astype(np.float64)
    lengths = np.outer(np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=1))
    assert (np.abs(found - a @ b.T) <= lengths * 2.0**-14).all()
