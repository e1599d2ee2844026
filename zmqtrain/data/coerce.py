"""Makes data sets of a job's data: of arrays, files of arrays, and data sets of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zmqtrain.data.arrays import ArrayDataset, check_split, described, parts_of
from zmqtrain.data.exact import plain, rounded
from zmqtrain.data.files import reading
from zmqtrain.data.images import ImageFolder
from zmqtrain.data.stream import Stream
from zmqtrain.data.subset import Named, Subset, Typed, first_of, layers
from zmqtrain.data.torch_dataset import TorchDataset
from zmqtrain.errors import ConfigError, DataError
from zmqtrain.models.base import Data, Dataset
from zmqtrain.user_code import user_code

READERS = {
    "datasets.arrow_dataset": "HuggingFace(dataset, inputs=..., target=...)",
    "datasets.iterable_dataset": "Stream(range(dataset.num_shards), read); docs/data.md has one",
    "pandas": "Frame(frame, inputs=..., target=...)",
    "polars": "Frame(frame, inputs=..., target=...)",
    "pyarrow": "Frame(table, inputs=..., target=...)",
}
"""The readers of other libraries' examples, whose ``take`` is not that of a Dataset."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Arrays:
    """Data of a job: ``train`` and ``evaluation`` examples; None: nothing is evaluated.

    Each is a Dataset, or a tuple or dict of arrays that share their first axis, usually (features,
    labels). A ``.npy`` file may take the place of an array; it is mapped into memory, not read.
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
        return f"Arrays(train={_shown(self.train)}, evaluation={_shown(self.evaluation)})"


@dataclass(frozen=True, slots=True)
class Holdout:
    """Data: ``fraction`` of the examples, chosen by ``seed``, is the evaluation set."""

    examples: Any
    fraction: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        check_split(self.fraction, self.seed)

    def load(self, directory: str | None) -> tuple[Dataset, Dataset]:
        """Return both sets; ``directory`` is not used."""
        dataset = as_dataset(self.examples)
        train, held_out = parts_of(len(dataset), self.fraction, self.seed)
        return Subset(dataset, train), Subset(dataset, held_out)


def as_dataset(examples: Any) -> Dataset:
    """Return a tuple or list of arrays, a single array, or a dict of them, whose batches are dicts,
    as a Dataset; a Dataset as it is.

    A data set of torch becomes one of zmqtrain; an iterable one is a stream of one part.

    Raises:
        DataError: it is something else, a file cannot be mapped, or arrays differ in length.
    """
    for module, reader in READERS.items():
        if f"{type(examples).__module__}.".startswith(f"{module}."):
            kind = f"{module.partition('.')[0]} {type(examples).__name__}"
            raise DataError(
                f"the examples are a {kind}; expected its columns, too: zmqtrain.data.{reader}"
            )
    if isinstance(examples, Dataset) and not hasattr(examples, "shape"):  # an array has take, too
        return examples
    if any(kind.__module__.startswith("torch.utils.data") for kind in type(examples).__mro__):
        return _of_torch(examples)
    if isinstance(examples, Mapping):
        return Named(tuple(examples), as_dataset(tuple(examples.values())))
    parts = examples if isinstance(examples, tuple | list) else (examples,)
    arrays = [_mapped(part) if isinstance(part, str | Path) else part for part in parts]
    if not all(hasattr(array, "shape") for array in arrays):
        kinds = ", ".join(sorted({type(array).__name__ for array in arrays}))
        advice = []
        if any(isinstance(part, dict) for part in parts):
            advice.append("give one dict for all arrays, or zmqtrain.data.TorchDataset(rows)")
        if isinstance(examples, tuple) and len(parts) == 2 and all(map(_is_set, parts)):
            sets = "a training and an evaluation set"
            advice.append(f"{sets} are zmqtrain.data.Arrays(train, evaluation)")
        raise DataError(
            f"the examples are {kinds}; expected arrays such as (features, labels), or by name, or "
            "an object with __len__ and take(indices); "
            + ("; ".join(advice) or "convert lists with numpy.array")
        )
    return ArrayDataset(*arrays)


def _is_set(part: Any) -> bool:
    return isinstance(part, tuple | dict | Dataset) and not hasattr(part, "shape")


def _shown(part: Any) -> str:
    if isinstance(part, Mapping):
        return f"Named({tuple(part)}, ArrayDataset({described(part.values())}))"
    return f"({described(part)})" if isinstance(part, tuple) else repr(part)


def _of_torch(examples: Any) -> Dataset:
    if hasattr(examples, "batch_sampler"):
        raise DataError(
            "the examples are a DataLoader; expected the data set that it loads: give "
            "loader.dataset, and batch_size to the job"
        )
    if any(kind.__name__ == "IterableDataset" for kind in type(examples).__mro__):
        return Stream([examples], iter)
    return TorchDataset(examples)


def _mapped(path: str | Path) -> NDArray[Any]:
    """Map the array in a file."""
    with reading(path):
        try:
            found = np.load(path, mmap_mode="r")
        except ValueError as error:
            if "object" not in str(error):
                raise
            raise DataError(
                f"{path}: cannot be read (it holds Python objects, or is no .npy file); expected "
                "an array of numbers, as np.save(path, np.array(lists, np.float32)) writes it; "
                "for other files, zmqtrain.data has CSV, Parquet and TFRecord"
            ) from error
    if not isinstance(found, np.ndarray):
        raise DataError(
            f"{path} is an archive of {', '.join(found.files)}; expected one array: load it with "
            "numpy.load and give its arrays"
        )
    return found


def _classes(dataset: Dataset) -> list[str] | None:
    """Return the names of the classes of an image folder, None for other data sets."""
    named = (layer.classes for layer in layers(dataset) if isinstance(layer, ImageFolder))
    return next(named, None)


def load_sets(data: Data, directory: str | None) -> tuple[Dataset, Dataset | None]:
    """Return the training set and the evaluation set, None if there is none.

    Raises:
        DataError: files are missing or damaged, or ``load()`` returns something else.
    """
    with user_code("load()", data, DataError):
        loaded: Any = data.load(directory)
    match loaded:
        case (Dataset() as training, (Dataset() | None) as evaluation):
            if evaluation is None:
                return Typed(training, data), None
            if not len(evaluation):  # a stream has no length; its error advises
                raise DataError("the evaluation set has 0 examples; expected at least 1, or no set")
            return Typed(training, data), Typed(evaluation)
    parts = loaded if isinstance(loaded, tuple) else ()
    kinds = f" of {[type(part).__name__ for part in parts]}" * bool(parts)
    raise DataError(
        f"load() of {data!r} returned a {type(loaded).__name__}{kinds}; expected (training set, "
        "evaluation set), each with __len__ and take(); for arrays use "
        "data=zmqtrain.data.Arrays(train=(X, y), evaluation=(X_test, y_test))"
    )


def data_of(train: Any, validation: Any, directory: str | None) -> Data:
    """Return training and validation examples as the data of a job."""
    if not isinstance(train, Data):
        return Arrays(train, validation)
    if validation is None:
        return train
    return Arrays(train.load(directory)[0], validation)


def weighted(train: Any, weights: Any) -> Any:
    """Return (features, labels) with a weight for each example.

    Raises:
        ConfigError, DataError: there is no one pair of arrays, or they are no finite numbers.
    """
    is_nested = isinstance(weights, tuple | list) and any(np.ndim(one) for one in weights)
    if is_nested or isinstance(weights, Mapping):
        raise ConfigError(
            "sample_weight has several arrays; expected one, with a weight for each example, which "
            "counts for all outputs; to weigh outputs give compile(loss_weights=...)"
        )
    if not isinstance(train, tuple) or len(train) != 2:
        raise ConfigError(
            "sample_weight is for training data (features, labels); expected a tuple of two "
            "arrays; other data give (features, labels, weights) themselves"
        )
    what = "sample_weight"
    found = rounded(plain(weights, what), what, "give weights as floats")
    if not np.isfinite(found).all():
        raise DataError(f"{what} holds NaN or infinity; expected a finite weight for each example")
    return *train, found


def first_batches(data: Data, directory: str | None, examples: int) -> Data:
    """Return the first examples of both sets."""
    train, validation = data.load(directory)
    return Arrays(
        first_of(train, examples), None if validation is None else first_of(validation, examples)
    )


def to_measure(examples: Any) -> Dataset:
    """Return the examples to measure: of a Data its evaluation set."""
    if isinstance(examples, Data):
        train, validation = examples.load(None)
        return Typed(train if validation is None else validation)
    return Typed(as_dataset(examples))
