"""Conversions that keep every value."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqtrain.data.exact import concatenated, exact, joined, plain, rounded
from zmqtrain.errors import DataError

DTYPES = ["bool", "int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32",
          "float64"]  # fmt: skip
WHOLE = [0, 1, -1, 127, -129, 255, 2**24, 2**24 + 1, 2**31, -(2**31) - 1, 2**32, 2**53, 2**53 + 1,
         2**62, 2**63 - 1, 2**63 - 512, -(2**63), 2**63, 2**64 - 1]  # fmt: skip
FLOATS = [0.5, -0.1, 1e-50, 65504.0, 1e30, 3.5e38, 1e300, math.inf, -math.inf, math.nan]


def array_of(values: list[Any], dtype: str) -> Any:
    """Return the values that a dtype can hold, in some approximation."""
    kind = np.dtype(dtype).kind
    if kind in "iu":
        info = np.iinfo(dtype)
        values = [v for v in values if isinstance(v, int) and info.min <= v <= info.max]
    with np.errstate(over="ignore"):
        return np.array(values, object).astype(dtype)


def value(number: Any) -> Any:
    """Return a number for comparisons without any rounding."""
    number = number.item()
    if isinstance(number, float) and not math.isfinite(number):
        return str(number)
    return Fraction(number)


def is_held(number: Any, dtype: str) -> bool:
    """Say whether a dtype has this very number; between floats and integers below 2**63."""
    exactly, kind = value(number), np.dtype(dtype).kind
    if kind == "f":
        with np.errstate(over="ignore"):
            is_small = isinstance(number.item(), float) or abs(exactly) < 2**63
            return is_small and value(np.asarray(number.item(), dtype)[()]) == exactly
    if isinstance(exactly, str) or exactly.denominator != 1:
        return False
    if isinstance(number.item(), float) and abs(exactly) >= 2**63:
        return False
    if kind == "b":
        return exactly in (0, 1)
    return bool(np.iinfo(dtype).min <= exactly <= np.iinfo(dtype).max)


@pytest.mark.parametrize("source", DTYPES)
def test_conversion_keeps_every_value_or_names_it(source: str) -> None:
    array = array_of([*WHOLE, *FLOATS], source)
    for target in DTYPES:
        kept = array[[is_held(number, target) for number in array]]
        found = exact(kept, target, "it", "advice")
        assert found.dtype == target
        assert list(map(value, found)) == list(map(value, kept))
        for number in array:
            if not is_held(number, target):
                with pytest.raises(DataError, match=rf"^it holds .* which {target} cannot hold"):
                    exact(np.array([number]), target, "it", "advice")


@given(st.lists(st.tuples(st.sampled_from([*WHOLE, *FLOATS]), st.sampled_from(DTYPES)), min_size=1))
def test_arrays_of_several_dtypes_are_joined_without_a_change(given: Any) -> None:
    arrays = [array for number, dtype in given if (array := array_of([number], dtype)).size]
    try:
        found = joined(arrays, "it", np.concatenate) if arrays else np.zeros(0)
    except DataError as error:
        assert "cannot hold unchanged" in str(error)
    else:
        assert list(map(value, found)) == [value(array[0]) for array in arrays]


def test_floats_are_rounded_and_whole_numbers_are_not() -> None:
    np.testing.assert_array_equal(
        rounded(np.array([0.1, 2**24 + 1.0]), "it"), np.float32([0.1, 2**24])
    )
    np.testing.assert_array_equal(rounded(np.array([2**24, 3]), "it"), [2**24, 3])
    with pytest.raises(DataError, match=r"it holds 16777217 .* float32 cannot hold"):
        rounded(np.array([2**24 + 1]), "it")
    with pytest.raises(DataError, match=r"it holds -1e\+39, which is infinite as float32"):
        rounded(np.array([1.0, -1e39]), "it")
    assert np.isinf(rounded(np.array([np.inf]), "it"))


def test_numbers_and_texts_are_not_joined() -> None:
    with pytest.raises(DataError, match="it holds <U1 and int64; expected one dtype"):
        joined([np.array(["a"]), np.array([1])], "it", np.concatenate)


def test_batches_of_other_shapes_are_not_concatenated() -> None:
    with pytest.raises(DataError, match=r"array 0 of it has rows of the shapes \[\[1\], \[2\]\]"):
        concatenated([(np.zeros((3, 1)),), (np.zeros((3, 2)),)], "it")
    with pytest.raises(DataError, match=r"there are \[1, 2\] arrays in it"):
        concatenated([(np.zeros(3),), (np.zeros(3), np.zeros(3))], "it")


def test_masked_array_without_masked_values_is_an_array_and_a_ragged_list_is_none() -> None:
    assert type(plain(np.ma.masked_array([1, 2]), "it")) is np.ndarray
    with pytest.raises(DataError, match=r"it is .* which is not an array"):
        plain([[1], [2, 3]], "it")
