"""Products of matrices that have the same bits on every processor.

Libraries of linear algebra add products up in an order that depends on the processor and on the
number of threads. So each row is rounded to whole numbers of a unit of its own, a power of two so
large that float64 holds every sum of their products: no order rounds it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_WHOLE_BITS = 53  # float64 has all whole numbers of so many bits


def rows_by_rows(a: Any, b: Any, *, exact: bool) -> Any:
    """Return a @ b.T in float32.

    ``exact``: with the same bits on every processor, by any number of threads. With k columns,
    elements are then rounded to 2^-((53 - log2 k) / 2) of the largest of their row, which is 2^-21
    for k = 1024.
    """
    if not exact:
        return a @ b.T
    bits = (_WHOLE_BITS - (a.shape[1] - 1).bit_length()) // 2
    rows, units = _whole(a, bits)
    others, other_units = (rows, units) if b is a else _whole(b, bits)
    product = rows @ others.T
    product *= units
    product *= other_units.T
    return product.astype(np.float32)


def _whole(rows: Any, bits: int) -> tuple[Any, Any]:
    """Return each row as whole numbers of up to 2^bits, and its unit, both float64."""
    _, exponents = np.frexp(np.abs(rows).max(axis=1, keepdims=True, initial=0))
    units = np.ldexp(1.0, exponents - bits)
    return np.rint(rows / units), units
