"""Batches that a function makes of a list of examples, such as a collator of Hugging Face."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias

import numpy as np

from zmqtrain.compute.generators import generators_kept, seed_generators
from zmqtrain.data.subset import OTHER_BATCHES
from zmqtrain.errors import DataError
from zmqtrain.models.base import Batch
from zmqtrain.models.trees import are_rows, is_tree, kind_of
from zmqtrain.user_code import user_code

Collate: TypeAlias = Callable[[list[Any]], Any]
"""Returns a batch of examples: a tuple or list of arrays, or a tree."""


def collated(
    collate: Collate, examples: Sequence[Any], owner: object, seed: Sequence[int] | None = None
) -> Batch:
    """Return the batch that ``collate`` makes; arrays and tensors of rows become arrays of NumPy.

    ``seed``: of the random numbers that it draws from torch, NumPy and ``random``; None: another
    thread may use their generators at once, so they are left alone.

    Raises:
        DataError: it raises, or returns no batch.
    """
    with user_code("collate_fn", owner, DataError), generators_kept() if seed else nullcontext():
        if seed is not None:
            seed_generators(*seed)
        batch = collate(list(examples))
    if is_tree(batch):
        return batch
    parts = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
    if not parts or not are_rows(parts):
        raise DataError(
            f"collate_fn of {owner!r} returned {kind_of(batch)}, {batch!r:.80}; expected a tuple "
            f"of arrays or tensors with a row for each example; {OTHER_BATCHES}"
        )
    return tuple(map(_on_host, parts))


def _on_host(array: Any) -> Any:
    """Return a tensor as an array; one that NumPy has no dtype for, such as bfloat16, as it is."""
    try:
        return np.asarray(array)
    except (TypeError, RuntimeError):
        return array
