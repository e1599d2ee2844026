"""Data sets made of other ones: some of the examples, each example changed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zmqtrain.errors import DataError
from zmqtrain.models.base import Array, Batch, Dataset
from zmqtrain.user_code import user_code


def take_seeded(dataset: Dataset, indices: Array, seed: int, passes: Array) -> Batch:
    """Return these examples, with random numbers of the seed and the pass where there are any."""
    own = getattr(dataset, "take_seeded", None)
    return dataset.take(indices) if own is None else own(indices, seed, passes)


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


class Mapped:
    """A data set whose examples go through a function: ``map`` of other libraries.

    ``function(features, label)`` gets the arrays of one example and returns those of the new one:
    a tuple of arrays or numbers, or a single one. If it has a parameter ``rng``, that is a
    ``numpy.random.Generator`` seeded by the job's seed, the pass and the example: each pass is
    augmented anew, and a batch that is computed again is the same.
    """

    def __init__(self, dataset: Dataset, function: Callable[..., Any]) -> None:
        self.dataset, self.function = dataset, function
        self._is_random = "rng" in inspect.signature(function).parameters

    def __len__(self) -> int:
        return len(self.dataset)

    def take(self, indices: Array) -> Batch:
        """Return these examples as in the first pass of a job with seed 0."""
        return self.take_seeded(indices, 0, np.zeros(len(indices), np.int64))

    def take_seeded(self, indices: Array, seed: int, passes: Array) -> Batch:
        rows = zip(*take_seeded(self.dataset, indices, seed, passes), strict=True)
        return stacked(
            self._call(row, int(index), [seed, int(number)])
            for row, index, number in zip(rows, indices, passes, strict=True)
        )

    def _call(self, row: tuple[Array, ...], index: int, seed: list[int]) -> Any:
        more = {"rng": np.random.default_rng([*seed, index])} if self._is_random else {}
        with user_code("the function", self, DataError, lambda: f"It was example {index}"):
            return self.function(*row, **more)

    def __repr__(self) -> str:
        name = getattr(self.function, "__qualname__", type(self.function).__name__)
        return f"Mapped({self.dataset!r}, {name})"
