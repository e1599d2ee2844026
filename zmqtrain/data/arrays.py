"""Data sets of arrays, in memory or mapped from files, and parts of them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zmqtrain.data.exact import is_of_frame, plain
from zmqtrain.data.subset import plain_batch
from zmqtrain.errors import ConfigError, DataError
from zmqtrain.models.base import Array, Batch


class ArrayDataset:
    """A Dataset of arrays that share their first axis, one row an example.

    Arrays that are mapped from files (``numpy.memmap``) stay there.
    """

    __slots__ = ("_mapped", "arrays")

    def __init__(self, *arrays: Array) -> None:
        """
        Raises:
            DataError: no array, a 0-d or sparse one, different numbers of rows, or missing values.
        """
        arrays = tuple(_checked(array, f"array {place}") for place, array in enumerate(arrays))
        shapes = [array.shape for array in arrays]
        if not shapes or () in shapes or len({shape[0] for shape in shapes}) != 1:
            raise DataError(
                f"a data set of arrays with the shapes {shapes}; expected at least one array, all "
                "with the same number of rows; give one row for each example in every array"
            )
        self.arrays: Batch = arrays
        self._mapped = {
            array.filename: _size(array.filename)
            for array in arrays
            if isinstance(array, np.memmap) and array.filename is not None
        }

    def __len__(self) -> int:
        return len(self.arrays[0])

    @property
    def source_files(self) -> list[Path]:
        """The files that are mapped."""
        return list(map(Path, self._mapped))

    def take(self, indices: Array) -> Batch:
        for path, size in self._mapped.items():  # pages beyond the end would kill the process
            if (found := _size(path)) != size:
                raise DataError(
                    f"{path} has {found} bytes, and had {size} when it was opened; data must not "
                    "change during training; start the task again with whole files"
                )
        return plain_batch(tuple(_rows(array, indices) for array in self.arrays), self)

    def __repr__(self) -> str:
        return f"ArrayDataset({described(self.arrays)})"


def _checked(array: Array, what: str) -> Array:
    """Return an array as it is; masked arrays and frames as one of NumPy."""
    if hasattr(array, "toarray"):
        raise DataError(
            f"{what} is a sparse {type(array).__name__}; expected an array with all values: give "
            "array.toarray()"
        )
    is_other = isinstance(array, np.ma.MaskedArray) or is_of_frame(array)
    return plain(array, what) if is_other else array


def _rows(array: Array, indices: Array) -> Array:
    """Return rows; for plain arrays and numbers ``take`` needs half the time of indexing."""
    are_numbers = isinstance(indices, np.ndarray) and indices.dtype.kind == "i"
    is_plain = are_numbers and type(array) is np.ndarray
    return array.take(indices, axis=0) if is_plain else array[indices]


def _size(path: Any) -> int:
    try:
        return os.stat(path).st_size
    except OSError:  # it was removed
        return 0


def split(arrays: Sequence[Array], fraction: float, seed: int) -> tuple[ArrayDataset, ArrayDataset]:
    """Return (training set, evaluation set): copies of the rows of ``arrays``, shuffled.

    The first round(``fraction`` * n) of all n rows, permuted by ``seed``, are held out.

    Raises:
        ConfigError: ``fraction`` is not between 0 and 1, or ``seed`` is negative.
        DataError: one of the two sets would be empty.
    """
    check_split(fraction, seed)
    whole = ArrayDataset(*arrays)
    train, held_out = parts_of(len(whole), fraction, seed)
    return ArrayDataset(*whole.take(train)), ArrayDataset(*whole.take(held_out))


def parts_of(
    examples: int, fraction: float, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the numbers of the training examples, and of those held out."""
    held_out = round(fraction * examples)
    if not 0 < held_out < examples:
        raise DataError(
            f"holding out {fraction} of {examples} examples leaves {examples - held_out} for "
            f"training and {held_out} for evaluation; expected at least one of each; give more "
            "examples or another holdout"
        )
    order = np.random.Generator(np.random.PCG64(seed)).permutation(examples)
    return order[held_out:], order[:held_out]


def check_split(fraction: float, seed: int) -> None:
    """Raise ConfigError unless 0 < ``fraction`` < 1 and ``seed`` >= 0."""
    if not 0 < fraction < 1:
        raise ConfigError(
            f"holdout is {fraction!r}; expected a fraction between 0 and 1 of the examples to "
            "hold out for evaluation, such as 0.2; correct holdout in the job"
        )
    check_seed(seed)


def check_seed(seed: int) -> None:
    """Raise ConfigError unless ``seed`` is an int of at least 0."""
    if not isinstance(seed, int) or seed < 0:
        raise ConfigError(
            f"seed is {seed!r}; expected an int of at least 0; correct seed in the job"
        )


def described(arrays: Iterable[Any]) -> str:
    """Return types and shapes, which are equal on every task that made the same arrays."""
    return ", ".join(map(_described, arrays))


def _described(part: Any) -> str:
    array = np.asarray(part) if is_of_frame(part) else part
    if hasattr(array, "shape"):
        return f"{array.dtype} {array.shape}"
    return str(array) if isinstance(array, str | Path) else type(array).__name__
