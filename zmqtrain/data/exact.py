"""Conversions of arrays that keep every value, or refuse the array.

Each raises DataError for values, shapes or dtypes that it cannot keep; the text begins with
``what``, the name of the array, and ends with ``advice``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from zmqtrain.errors import DataError
from zmqtrain.models.base import Array, Batch

ONE_DTYPE = "return one dtype for every example, as np.float32(value) does"


def plain(array: Any, what: str) -> NDArray[Any]:
    """Return an array of NumPy in native byte order; ``what`` names ``array`` in an error.

    Columns of pandas and polars lose their index, which would be mistaken for row numbers.
    """
    if is_of_frame(array):
        array = _of_frame(array, what)
    if isinstance(array, np.ma.MaskedArray) and np.ma.is_masked(array):
        count = int(np.ma.getmaskarray(array).sum())
        raise DataError(
            f"{what} is a masked array with {count} masked values; expected a "
            "value everywhere: replace them with filled(value), or leave these examples out"
        )
    try:
        found = np.asarray(array)
    except (TypeError, ValueError, RuntimeError) as error:  # lists of different lengths, bfloat16
        raise DataError(
            f"{what} is {array!r:.80}, which is not an array ({error}); expected numbers, or lists "
            "of one length: pad them"
        ) from error
    return found if found.dtype.isnative else found.astype(found.dtype.newbyteorder("="))


def is_of_frame(array: Any) -> bool:
    """Return whether it is a column, an index or a frame of pandas or polars."""
    return type(array).__module__.partition(".")[0] in ("pandas", "polars")


def _of_frame(part: Any, what: str) -> NDArray[Any]:
    if np.ndim(part) == 2:
        columns = getattr(part, "iloc", part)
        each = [_of_frame(columns[:, place], what) for place in range(part.shape[1])]
        return joined(each, f"the columns of {what}", partial(np.stack, axis=1))
    missing = int(part.isna().sum()) if hasattr(part, "isna") else part.null_count()
    if missing and getattr(part.dtype, "kind", "") != "f":  # where NaN is a value
        raise DataError(
            f"{what}, a column of {type(part).__module__.partition('.')[0]}, has {missing} empty "
            "values; expected a value in each row: fill them in, or leave these rows out"
        )
    return np.asarray(part)


def exact(array: NDArray[Any], dtype: DTypeLike, what: str, advice: str) -> NDArray[Any]:
    """Return ``array`` as ``dtype``, with every value unchanged."""
    dtype = np.dtype(dtype)
    if array.dtype == dtype:
        return array
    try:
        with np.errstate(all="ignore"):
            found = array.astype(dtype)
            is_kept = _is_kept(array, found)
    except (TypeError, ValueError, OverflowError):  # a text that is not a number, for instance
        is_kept = np.zeros(array.shape, np.bool_)
    if not is_kept.all():
        value = array[~is_kept].reshape(-1)[0]
        raise DataError(
            f"{what} holds {value!s:.80} ({array.dtype}), which {dtype} cannot hold unchanged; "
            f"{advice}"
        )
    return found


def _is_kept(array: NDArray[Any], found: NDArray[Any]) -> NDArray[np.bool_]:
    """Return where ``found``, a conversion of ``array``, has the same values; NaN equals NaN."""
    if np.can_cast(array.dtype, found.dtype, "safe") and found.dtype.kind not in "fc":
        return np.ones(array.shape, np.bool_)
    is_kept = np.asarray((found == array) | ((found != found) & (array != array)))
    whole, other = (array, found) if array.dtype.kind in "iu" else (found, array)
    if whole.dtype.kind in "iu" and other.dtype.kind == "f":
        is_kept &= np.abs(other) < 2.0**63  # NumPy compares 64-bit integers with floats as floats
        is_kept &= other.astype(np.int64) == whole
    return is_kept


NARROW = (
    "name the column alone (inputs='id' is int64), number its values from 0 on, or convert it to "
    "floats, which are rounded"
)


def rounded(array: NDArray[Any], what: str, advice: str = NARROW) -> NDArray[np.float32]:
    """Return numbers as float32: floats are rounded to the nearest, whole numbers are exact."""
    if array.dtype.kind != "f":
        return exact(array, np.float32, what, advice)
    with np.errstate(over="ignore"):
        found = array.astype(np.float32, copy=False)
    if (is_beyond := np.isinf(found) & np.isfinite(array)).any():
        raise DataError(
            f"{what} holds {array[is_beyond].reshape(-1)[0]}, which is infinite as float32; "
            "expected numbers up to 3.4e38: scale them, or take their logarithms"
        )
    return found


def promoted(dtypes: Iterable[np.dtype[Any]]) -> np.dtype[Any]:
    """Return the dtype that holds numbers of all these dtypes; of int64 and uint64, int64.

    NumPy's own choice for these two, float64, changes numbers above 2**53.

    Raises:
        TypeError: only some of them are of numbers.
    """
    every = set(dtypes)
    if len({dtype.kind in "biufc" for dtype in every}) > 1:
        raise TypeError("numbers and other values have no common dtype")
    found = np.result_type(*every)
    is_whole = all(dtype.kind in "biu" for dtype in every)
    return np.dtype(np.int64) if is_whole and found.kind == "f" else found


def joined(
    arrays: Sequence[Array], what: str, join: Callable[[Sequence[Array]], Array]
) -> NDArray[Any]:
    """Return the arrays joined by ``join``, such as ``numpy.stack``, with all values unchanged."""
    dtypes = {array.dtype for array in arrays}
    if len(dtypes) > 1:
        try:
            dtype = promoted(dtypes)
        except TypeError:
            raise DataError(
                f"{what} holds {' and '.join(sorted(map(str, dtypes)))}; expected one dtype; "
                f"{ONE_DTYPE}"
            ) from None
        arrays = [exact(array, dtype, what, ONE_DTYPE) for array in arrays]
    return np.asarray(join(arrays))


def combined(parts: Sequence[Batch], what: str, join: Callable[[Sequence[Array]], Array]) -> Batch:
    """Return batches one behind another (``join`` is np.concatenate), or examples (np.stack)."""
    if len(counts := {len(part) for part in parts}) > 1:
        raise DataError(
            f"there are {sorted(counts)} arrays in {what}; expected the same number each time"
        )
    batch = []
    for place, column in enumerate(zip(*parts, strict=True)):
        is_stacked = join is np.stack
        if len(shapes := {np.shape(array)[not is_stacked :] for array in column}) > 1:
            raise DataError(
                f"array {place} of {what} has rows of the shapes {sorted(map(list, shapes))}; "
                "expected one shape: crop, resize or pad them"
            )
        batch.append(joined(column, f"array {place} of {what}", join))
    return tuple(batch)


def concatenated(batches: Sequence[Batch], what: str) -> Batch:
    """Return batches of rows, one behind another, as one batch."""
    return batches[0] if len(batches) == 1 else combined(batches, what, np.concatenate)
