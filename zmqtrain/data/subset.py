"""Reads some examples of a data set, and makes batches of single ones.

A result that is not a batch of these examples raises a DataError with the data set's name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zmqtrain.data.exact import ONE_DTYPE, combined, exact, is_of_frame, plain
from zmqtrain.errors import DataError
from zmqtrain.models.base import Array, Batch, Dataset
from zmqtrain.models.trees import are_rows, is_tree, kind_of

OTHER_BATCHES = (
    "for a batch of another kind, such as a graph, give a dict of its parts, which the model gets "
    "as it is"
)
OTHER_EXAMPLES = (
    "give TorchDataset or Stream a collate_fn, which may make batches of any kind of them"
)


def take_seeded(
    dataset: Dataset, indices: Array, seed: int, passes: Array, owner: object = None
) -> Batch:
    own = getattr(dataset, "take_seeded", None)
    batch = dataset.take(indices) if own is None else own(indices, seed, passes)
    return checked(batch, len(indices), dataset if owner is None else owner)


def checked(batch: Any, rows: int, owner: object) -> Batch:
    """Return the result of a data set's ``take()``, checked to be a batch of ``rows`` examples.

    The number of examples in a tree is not checked: see :mod:`zmqtrain.models.trees`.
    """
    if is_tree(batch):
        return batch
    if not are_rows(batch) or not batch or not np.shape(batch[0]):
        raise DataError(
            f"take() of {owner!r} returned {batch!r:.80}; expected a tuple of arrays with a row "
            f"for each example, such as (features, labels); {OTHER_BATCHES}"
        )
    for place, array in enumerate(batch):
        if np.shape(array)[:1] != (rows,):
            raise DataError(
                f"take() of {owner!r} got {rows} indices and returned array {place} of the shape "
                f"{np.shape(array)}; expected {rows} rows in each array, in the order of the "
                f"indices; {OTHER_BATCHES}"
            )
    return plain_batch(batch, owner)


def check_rows(batch: Batch, owner: object, advice: str) -> None:
    """Raise DataError if a batch is a tree."""
    if not are_rows(batch):
        found = f"a batch of {owner!r} is {kind_of(batch)}"
        raise DataError(f"{found}; expected a tuple of arrays; {advice}")


def plain_batch(batch: Batch, owner: object) -> Batch:
    """Return the arrays of a batch in native byte order."""
    if all(map(_is_plain, batch)):
        return batch
    return tuple(
        array if _is_plain(array) else plain(array, f"array {place} of {owner!r}")
        for place, array in enumerate(batch)
    )


def _is_plain(array: Any) -> bool:
    """Return whether an array can stay as it is, as those of other libraries can."""
    if type(array) is np.ndarray:
        return bool(array.dtype.isnative)
    is_other = isinstance(array, np.ndarray) or is_of_frame(array)
    return not is_other and hasattr(array, "dtype")


def layers(dataset: Any) -> Iterator[Any]:
    """Yield a data set, the one that it wraps, and so on."""
    while dataset is not None:
        yield dataset
        dataset = getattr(dataset, "dataset", None)


def as_row(example: Any) -> Batch:
    """Return the arrays of an example, a tuple of arrays and numbers or a single one, as copies.

    Those of a dict have its names. Generators and functions may reuse an array for the next one.
    """
    if isinstance(example, Mapping):
        named = example.items()
        return {n: np.array(plain(v, f"{n!r} of an example")) for n, v in named}
    values = example if isinstance(example, tuple | list) else (example,)
    return tuple(
        np.array(plain(value, f"array {place} of an example")) for place, value in enumerate(values)
    )


def stacked(examples: Iterable[Any]) -> Batch:
    """Return examples, each a tuple of arrays and numbers or a single one, as one batch."""
    return stacked_rows([as_row(example) for example in examples])


def stacked_rows(rows: Sequence[Batch]) -> Batch:
    """Return the arrays of examples as one batch, those of dicts as a dict."""
    if any(isinstance(row, Mapping) for row in rows):
        if len(kinds := {kind_of(row) for row in rows}) > 1:
            raise DataError(
                f"examples are {' and '.join(sorted(kinds))}; expected the same names in all of "
                f"them; {OTHER_EXAMPLES}"
            )
        arrays = stacked_rows([tuple(row[name] for name in rows[0]) for row in rows])
        return dict(zip(rows[0], arrays, strict=True))
    for place, value in enumerate(rows[0] if rows else ()):
        if value.dtype == object:
            raise DataError(
                f"array {place} of the examples holds {value.ravel()[0]!r:.80}; expected "
                f"arrays or numbers; {OTHER_EXAMPLES}"
            )
    return combined(rows, "the examples", np.stack)


class Wrapper:
    """A data set with the examples of another one."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)


class Named(Wrapper):
    """A data set whose arrays have names: a batch is a dict."""

    def __init__(self, names: Sequence[str], dataset: Dataset) -> None:
        super().__init__(dataset)
        self._names = names

    def take(self, indices: Array) -> Batch:
        return dict(zip(self._names, self.dataset.take(indices), strict=True))

    def __repr__(self) -> str:
        return f"Named({self._names}, {self.dataset!r})"


class Seeded(Wrapper):
    """A data set whose random numbers depend on the seed, the pass and the example."""

    def take(self, indices: Array) -> Batch:
        """Return these examples as in the first pass of a job with seed 0."""
        return self.take_seeded(indices, 0, np.zeros(len(indices), np.int64))

    def take_seeded(self, indices: Array, seed: int, passes: Array) -> Batch:
        raise NotImplementedError


class Typed(Wrapper):
    """A data set whose batches have arrays like those of the first one.

    Every batch has the same number of arrays, with the same dtypes and ranks; numbers of another
    dtype are converted if none changes. All data that a task trains on or evaluates is wrapped.
    """

    def __init__(
        self, dataset: Dataset, owner: object = None, *, has_one_shape: bool = False
    ) -> None:
        """``owner``: named in errors instead of ``dataset``.

        ``has_one_shape``: rows have the shape of those of the first batch, and texts its length.
        """
        super().__init__(dataset)
        self._owner, self._has_one_shape = owner, has_one_shape
        self._first: dict[str, Batch] = {}

    def take(self, indices: Array) -> Batch:
        return self._fitted(checked(self.dataset.take(indices), len(indices), self))

    def take_seeded(self, indices: Array, seed: int, passes: Array) -> Batch:
        return self._fitted(take_seeded(self.dataset, indices, seed, passes, self))

    def __repr__(self) -> str:
        return repr(self.dataset if self._owner is None else self._owner)

    def _fitted(self, batch: Batch) -> Batch:
        if self._has_one_shape:
            check_rows(batch, self, "Cached keeps rows: leave it out, or cache what is collated")
        if not are_rows(batch):
            return batch
        if not self._first:
            self._first.setdefault("batch", tuple(array[:0] for array in batch))
        first = self._first["batch"]
        if len(batch) != len(first):
            raise DataError(
                f"take() of {self!r} returned {len(batch)} arrays, and {len(first)} for the first "
                "batch; expected the same number for all examples"
            )
        pairs = enumerate(zip(batch, first, strict=True))
        return tuple(self._like(place, array, like) for place, (array, like) in pairs)

    def _like(self, place: int, array: Array, first: Array) -> Array:
        """Return ``array`` in the dtype of ``first``, the same array of the first batch."""
        form, has_form = "number of dimensions", array.ndim == first.ndim
        if self._has_one_shape:
            form, has_form = "shape", array.shape[1:] == first.shape[1:]
        if has_form and array.dtype == first.dtype:
            return array
        what = f"array {place} of {self!r}"
        if not has_form:
            raise DataError(
                f"{what} has examples of the shape {array.shape[1:]}, and {first.shape[1:]} in the "
                f"first batch; expected one {form}: crop, resize or pad them"
            )
        advice = f"the first batch has {first.dtype}; {ONE_DTYPE}"
        if not (isinstance(array, np.ndarray) and isinstance(first, np.ndarray)):
            raise DataError(f"{what} holds {array.dtype}; {advice}")
        are_texts = array.dtype.kind == first.dtype.kind and array.dtype.kind in "SU"
        if are_texts and not self._has_one_shape:
            return array
        return exact(array, first.dtype, what, "keep numbers of texts" if are_texts else advice)


class Subset(Wrapper):
    """Some examples of a data set."""

    def __init__(self, dataset: Dataset, indices: NDArray[np.int64]) -> None:
        super().__init__(dataset)
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def take(self, indices: Array) -> Batch:
        return self.dataset.take(self.indices[indices])

    def take_seeded(self, indices: Array, seed: int, passes: Array) -> Batch:
        return take_seeded(self.dataset, self.indices[indices], seed, passes)

    def __repr__(self) -> str:
        return f"{len(self)} examples of {self.dataset!r}"


def first_of(dataset: Dataset, count: int) -> Subset:
    """Return the first examples of a data set, at most ``count``."""
    return Subset(dataset, np.arange(min(count, len(dataset))))
