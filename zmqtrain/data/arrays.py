"""Data sets of arrays, in memory or mapped from files; what else can be examples."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zmqtrain.data.exact import is_of_frame, plain
from zmqtrain.data.files import reading
from zmqtrain.data.images import ImageFolder
from zmqtrain.data.stream import Stream
from zmqtrain.data.subset import Subset, layers, plain_batch
from zmqtrain.errors import ConfigError, DataError
from zmqtrain.models.base import Array, Batch, Dataset

READERS = {
    "datasets.arrow_dataset": "HuggingFace(dataset, inputs=..., target=...)",
    "datasets.iterable_dataset": "Stream(range(dataset.num_shards), read); docs/data.md has one",
    "pandas": "Table(frame, inputs=..., target=...)",
    "polars": "Table(frame, inputs=..., target=...)",
    "pyarrow": "Table(table, inputs=..., target=...)",
}
"""How examples of other libraries are read; they have another ``take`` than a Dataset."""


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
    def files(self) -> list[Path]:
        """The files that are mapped."""
        return list(map(Path, self._mapped))

    def take(self, indices: Array) -> Batch:
        """Return copies of these rows of each array.

        Raises:
            DataError: a file that is mapped has another size than before.
        """
        for path, size in self._mapped.items():  # pages beyond the end would kill the process
            if (found := _size(path)) != size:
                raise DataError(
                    f"{path} has {found} bytes, and had {size} when it was opened; data must stay "
                    "as it is while it trains; start the task again with whole files"
                )
        return plain_batch(tuple(array[indices] for array in self.arrays), self)

    def __repr__(self) -> str:
        return f"ArrayDataset({_described(self.arrays)})"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Arrays:
    """Data that the job makes: ``train`` and ``evaluation`` examples, or None for the latter.

    Each is a tuple of arrays that share their first axis, usually (features, labels), or a Dataset.
    Instead of an array a ``.npy`` file may be named; it is mapped into memory, not read.
    """

    train: Any
    evaluation: Any = None

    def load(self, directory: str | None) -> tuple[Dataset, Dataset | None]:
        """Return both sets; ``directory`` is not used.

        Raises:
            DataError: the folders of images have other classes.
        """
        train = as_dataset(self.train)
        if self.evaluation is None:
            return train, None
        evaluation = as_dataset(self.evaluation)
        expected, found = _classes(train), _classes(evaluation)
        if None not in (expected, found) and expected != found:
            raise DataError(
                f"{evaluation!r} has the classes {found}, and {train!r} has {expected}; expected "
                "the same, which are numbered alike: make an empty folder for each missing class"
            )
        return train, evaluation

    def __repr__(self) -> str:
        texts = [
            f"({_described(part)})" if isinstance(part, tuple) else repr(part)
            for part in (self.train, self.evaluation)
        ]
        return f"Arrays(train={texts[0]}, evaluation={texts[1]})"


@dataclass(frozen=True, slots=True)
class Holdout:
    """Data: examples of which the fraction ``fraction``, chosen by ``seed``, is held out.

    The evaluation set is what is held out.
    """

    examples: Any
    fraction: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        check_split(self.fraction, self.seed)

    def load(self, directory: str | None) -> tuple[Dataset, Dataset]:
        """Return both sets; ``directory`` is not used."""
        dataset = as_dataset(self.examples)
        train, held_out = _parts(len(dataset), self.fraction, self.seed)
        return Subset(dataset, train), Subset(dataset, held_out)


def as_dataset(examples: Any) -> Dataset:
    """Return a tuple or list of arrays, or a single array, as a Dataset; a Dataset as it is.

    A data set of torch becomes one of zmqtrain; an iterable one is a stream of one part.

    Raises:
        DataError: it is something else, a file cannot be mapped, or the arrays have different
            numbers of rows.
    """
    for module, reader in READERS.items():
        if f"{type(examples).__module__}.".startswith(f"{module}."):
            kind = f"{module.partition('.')[0]} {type(examples).__name__}"
            raise DataError(
                f"the examples are a {kind}; expected to know its columns: zmqtrain.data.{reader}"
            )
    if isinstance(examples, Dataset) and not hasattr(examples, "shape"):  # an array has take, too
        return examples
    if any(kind.__module__.startswith("torch.utils.data") for kind in type(examples).__mro__):
        if hasattr(examples, "batch_sampler"):
            raise DataError(
                "the examples are a DataLoader; expected the data set that it loads: batches are "
                "leased by number, so give loader.dataset, and batch_size to the job"
            )
        if any(kind.__name__ == "IterableDataset" for kind in type(examples).__mro__):
            return Stream([examples], iter)
        from zmqtrain.data.torch_dataset import TorchDataset  # which may need what needs this

        return TorchDataset(examples)
    parts = examples if isinstance(examples, tuple | list) else (examples,)
    arrays = [_mapped(part) if isinstance(part, str | Path) else part for part in parts]
    if not all(hasattr(array, "shape") for array in arrays):
        kinds = ", ".join(sorted({type(array).__name__ for array in arrays}))
        raise DataError(
            f"the examples are {kinds}; expected arrays such as (features, labels), or an object "
            "with __len__ and take(indices); convert lists with numpy.array"
        )
    return ArrayDataset(*arrays)


def _classes(dataset: Dataset) -> list[str] | None:
    """Return the names of the classes of a data set that numbers them itself."""
    named = (layer.classes for layer in layers(dataset) if isinstance(layer, ImageFolder))
    return next(named, None)


def _checked(array: Array, what: str) -> Array:
    """Return an array as it is, or as one of NumPy where that has other rows."""
    if hasattr(array, "toarray"):
        raise DataError(
            f"{what} is a sparse {type(array).__name__}; expected an array with all values: give "
            "array.toarray()"
        )
    is_other = isinstance(array, np.ma.MaskedArray) or is_of_frame(array)
    return plain(array, what) if is_other else array


def _mapped(path: str | Path) -> NDArray[Any]:
    with reading(path):
        try:
            found = np.load(path, mmap_mode="r")
        except ValueError as error:
            if "Python objects" not in str(error):
                raise
            raise DataError(
                f"{path}: cannot be read (it holds Python objects); expected numbers: save "
                "lists of one length, as np.save(path, np.array(lists, np.float32)) does"
            ) from error
    if not isinstance(found, np.ndarray):
        raise DataError(
            f"{path} is an archive of {', '.join(found.files)}; expected one array: load it with "
            "numpy.load and give its arrays"
        )
    return found


def _size(path: Any) -> int:
    try:
        return os.stat(path).st_size
    except OSError:  # it was removed
        return 0


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
    train, held_out = _parts(len(whole), fraction, seed)
    return ArrayDataset(*whole.take(train)), ArrayDataset(*whole.take(held_out))


def _parts(
    examples: int, fraction: float, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the numbers of the examples for training, and of those that are held out."""
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


def _described(arrays: tuple[Any, ...]) -> str:
    """Types and shapes: equal on every task that made the same arrays, and short."""
    return ", ".join(
        str(array) if isinstance(array, str | Path) else f"{array.dtype} {array.shape}"
        for array in (np.asarray(part) if is_of_frame(part) else part for part in arrays)
    )
