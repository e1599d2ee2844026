"""Data sets held in memory as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zmqtrain.errors import ConfigError, DataError
from zmqtrain.models.base import Array, Batch, Dataset


class ArrayDataset:
    """A Dataset of arrays that share their first axis, one row an example."""

    __slots__ = ("arrays",)

    def __init__(self, *arrays: Array) -> None:
        """
        Raises:
            DataError: no array, a 0-d array, or different numbers of rows.
        """
        shapes = [array.shape for array in arrays]
        if not shapes or () in shapes or len({shape[0] for shape in shapes}) != 1:
            raise DataError(
                f"a data set of arrays with the shapes {shapes}; expected at least one array, all "
                "with the same number of rows; give one row for each example in every array"
            )
        self.arrays: Batch = arrays

    def __len__(self) -> int:
        return len(self.arrays[0])

    def take(self, indices: Array) -> Batch:
        """Return copies of these rows of each array."""
        return tuple(array[indices] for array in self.arrays)

    def __repr__(self) -> str:
        return f"ArrayDataset({_described(self.arrays)})"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Arrays:
    """Data that the job makes: ``train`` and ``evaluation`` examples, or None for the latter.

    Each is a tuple of arrays that share their first axis, usually (features, labels), or a Dataset.
    """

    train: tuple[Array, ...] | Dataset
    evaluation: tuple[Array, ...] | Dataset | None = None

    def load(self, directory: str | None) -> tuple[Dataset, Dataset | None]:
        """Return both sets; ``directory`` is not used."""
        evaluation = None if self.evaluation is None else as_dataset(self.evaluation)
        return as_dataset(self.train), evaluation

    def __repr__(self) -> str:
        texts = [
            f"({_described(part)})" if isinstance(part, tuple) else repr(part)
            for part in (self.train, self.evaluation)
        ]
        return f"Arrays(train={texts[0]}, evaluation={texts[1]})"


def as_dataset(examples: Any) -> Dataset:
    """Return a tuple or list of arrays, or a single array, as a Dataset; a Dataset as it is.

    Raises:
        DataError: it is something else, or the arrays have different numbers of rows.
    """
    if isinstance(examples, Dataset) and not hasattr(examples, "shape"):  # an array has take, too
        return examples
    arrays = examples if isinstance(examples, tuple | list) else (examples,)
    if not all(hasattr(array, "shape") for array in arrays):
        kinds = ", ".join(type(array).__name__ for array in arrays)
        raise DataError(
            f"the examples are {kinds}; expected arrays such as (features, labels), or an object "
            "with __len__ and take(indices); convert lists with numpy.array"
        )
    return ArrayDataset(*arrays)


def split(arrays: Sequence[Array], fraction: float, seed: int) -> tuple[ArrayDataset, ArrayDataset]:
    """Return (training set, evaluation set): copies of the rows of ``arrays``, shuffled.

    The first round(``fraction`` * n) rows of a permutation of all n, seeded with ``seed``, are
    held out for evaluation.

    Raises:
        ConfigError: ``fraction`` is not between 0 and 1, or ``seed`` is negative.
        DataError: one of the two sets would be empty.
    """
    check_split(fraction, seed)
    whole = ArrayDataset(*arrays)
    held_out = round(fraction * len(whole))
    if not 0 < held_out < len(whole):
        raise DataError(
            f"holding out {fraction} of {len(whole)} examples leaves {len(whole) - held_out} for "
            f"training and {held_out} for evaluation; expected at least one of each; give more "
            "examples or another holdout"
        )
    order = np.random.Generator(np.random.PCG64(seed)).permutation(len(whole))
    return (
        ArrayDataset(*whole.take(order[held_out:])),
        ArrayDataset(*whole.take(order[:held_out])),
    )


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


def _described(arrays: tuple[Array, ...]) -> str:
    """Types and shapes: equal on every task that made the same arrays, and short."""
    return ", ".join(f"{array.dtype} {array.shape}" for array in arrays)
