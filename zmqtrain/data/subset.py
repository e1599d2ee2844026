"""Reading some examples of a data set, and making a batch of single ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zmqtrain.errors import DataError
from zmqtrain.models.base import Array, Batch, Dataset


def take_seeded(dataset: Dataset, indices: Array, seed: int, passes: Array) -> Batch:
    """Return these examples, with random numbers of the seed and the pass where there are any.

    Raises:
        DataError: it returns something else; see :func:`checked`.
    """
    own = getattr(dataset, "take_seeded", None)
    batch = dataset.take(indices) if own is None else own(indices, seed, passes)
    return checked(batch, len(indices), dataset)


def checked(batch: Any, rows: int, owner: object) -> Batch:
    """Return what ``take()`` of a data set has returned, if it is a batch of so many examples.

    Raises:
        DataError: it is not; the text names ``owner``.
    """
    if not isinstance(batch, tuple) or not batch or not getattr(batch[0], "shape", None):
        raise DataError(
            f"take() of {owner!r} returned {batch!r:.80}; expected a tuple of arrays with a row "
            "for each example, such as (features, labels)"
        )
    for place, array in enumerate(batch):
        if np.shape(array)[:1] != (rows,):
            raise DataError(
                f"take() of {owner!r} was asked for {rows} examples, and array {place} that it "
                f"returned has the shape {np.shape(array)}; expected {rows} rows in each array, in "
                "the order of the indices"
            )
    return batch


def layers(dataset: Any) -> Iterator[Any]:
    """Yield a data set, that which it wraps, and so on."""
    while dataset is not None:
        yield dataset
        dataset = getattr(dataset, "dataset", None)


def stacked(examples: Iterable[Any]) -> Batch:
    """Return examples, each a tuple of arrays and numbers or a single one, as one batch.

    Raises:
        DataError: they have different shapes, or hold something else.
    """
    rows = [row if isinstance(row, tuple | list) else (row,) for row in examples]
    columns = [[np.asarray(value) for value in column] for column in zip(*rows, strict=True)]
    for place, column in enumerate(columns):
        if len(shapes := {array.shape for array in column}) > 1:
            raise DataError(
                f"array {place} of the examples has the shapes {sorted(map(list, shapes))}; "
                "expected one shape: crop, resize or pad them"
            )
        if column[0].dtype == object:
            raise DataError(
                f"array {place} of the examples holds {column[0].item()!r:.80}; expected arrays or "
                "numbers"
            )
    return tuple(np.stack(column) for column in columns)


class Seeded:
    """A data set that has random numbers of the seed, the pass and the example."""

    def take(self, indices: Array) -> Batch:
        """Return these examples as in the first pass of a job with seed 0."""
        return self.take_seeded(indices, 0, np.zeros(len(indices), np.int64))

    def take_seeded(self, indices: Array, seed: int, passes: Array) -> Batch:
        """
        Raises:
            DataError: an example cannot be read or made.
        """
        raise NotImplementedError


class Subset:
    """Some examples of a data set."""

    def __init__(self, dataset: Dataset, indices: NDArray[np.int64]) -> None:
        self.dataset, self.indices = dataset, indices

    def __len__(self) -> int:
        return len(self.indices)

    def take(self, indices: Array) -> Batch:
        return self.dataset.take(self.indices[indices])

    def take_seeded(self, indices: Array, seed: int, passes: Array) -> Batch:
        return take_seeded(self.dataset, self.indices[indices], seed, passes)

    def __repr__(self) -> str:
        return f"{len(self)} examples of {self.dataset!r}"


def first_of(dataset: Dataset, count: int) -> Subset:
    """Return the first examples of a data set, at most so many."""
    return Subset(dataset, np.arange(min(count, len(dataset))))
