"""A short description of a training set, to compare it between tasks."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from zmqtrain.data.stream import stream_of
from zmqtrain.data.subset import checked
from zmqtrain.errors import DataError
from zmqtrain.models.base import Batch, Dataset
from zmqtrain.models.trees import are_rows, kind_of, leaves, mapped
from zmqtrain.user_code import user_code


def describe(dataset: Dataset) -> str:
    """Return the length, the types of the arrays, and a digest of the first and last example.

    It is equal on tasks with equal data. For a stream it has the number of parts, and a digest of
    the first examples of the first and last part. Augmented examples, which differ at each reading,
    have no digest.

    Raises:
        DataError: the dataset raises.
    """
    stream = stream_of(dataset)
    count = len(dataset) if stream is None else len(stream.parts)
    if not count:
        return "no examples"
    last = count - 1
    batches = [_take(dataset, number) for number in (0, last, 0, last)]
    kinds = kind_of(batches[0])
    if are_rows(batches[0]):
        kinds = ", ".join(f"{array.dtype} {list(array.shape[1:])}" for array in batches[0])
    before, after = _digest(*batches[:2]), _digest(*batches[2:])
    digest = before if before == after else "different at each reading"
    return f"{count} {'examples' if stream is None else 'parts'} of {kinds} ({digest})"


def _take(dataset: Dataset, number: int) -> Batch:
    with user_code("take()", dataset, DataError, lambda: f"It was example {number}"):
        batch = dataset.take(np.array([number]))
    return mapped(_plain, checked(batch, 1, dataset))


def _plain(leaf: Any) -> Any:
    """Return an array; of an object that is none its type, as it may hold addresses."""
    try:
        array = np.asarray(leaf)
    except (TypeError, ValueError, RuntimeError):  # a tensor of bfloat16, for instance
        array = np.array(None)
    return np.array(type(leaf).__name__) if array.dtype == object else array


def _digest(*batches: Batch) -> str:
    digest = hashlib.blake2b(digest_size=6)
    for batch in batches:
        for _, leaf in leaves(batch):
            digest.update(leaf.tobytes())
    return digest.hexdigest()
