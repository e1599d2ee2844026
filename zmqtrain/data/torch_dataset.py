"""Examples of a ``torch.utils.data.Dataset``, read in processes if ``num_workers`` is set."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from zmqtrain.compute.generators import generators_kept
from zmqtrain.data.processes import Readers
from zmqtrain.data.subset import OTHER_BATCHES, Seeded, stacked
from zmqtrain.errors import DataError
from zmqtrain.models.base import Array, Batch
from zmqtrain.user_code import user_code


class TorchDataset(Seeded):
    """A map-style data set (``__len__`` and ``__getitem__``), as torch has it, with its transforms.

    ``num_workers``: processes that read the examples of a batch in parallel, see
    :class:`zmqtrain.data.Parallel`. ``collate_fn``: makes a batch of a list of examples, in this
    process; without it arrays are stacked.

    The random numbers of torch, NumPy and ``random`` that transforms draw are seeded by the job's
    seed, the pass and the example. Without ``num_workers`` they come from generators that a model
    may share, and whose states are restored: so nothing is read ahead then, and workers that are
    threads of one process disturb each other.
    """

    def __init__(
        self,
        dataset: Any,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        """
        Raises:
            ConfigError: ``num_workers`` is negative.
            DataError: the data set has no length, or no examples by number.
        """
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise DataError(
                f"{dataset!r:.80} has no __getitem__ and __len__; expected a map-style data set; "
                "give an iterable one to the job itself, or to zmqtrain.data.Stream"
            )
        examples = _Examples(dataset, stack=collate_fn is None)
        super().__init__(examples)
        self.collate_fn = collate_fn
        self.may_be_read_ahead = num_workers > 0
        self._reader = Readers(examples, num_workers) if num_workers else examples

    def take_seeded(self, indices: Array, seed: int, passes: Array) -> Batch:
        arrays = self._reader.take_seeded(indices, seed, passes)
        if self.collate_fn is None:
            return arrays
        with user_code("collate_fn", self, DataError):
            batch = self.collate_fn(list(arrays[0]))
        parts = batch if isinstance(batch, tuple | list) else (batch,)
        try:
            found = tuple(map(np.asarray, parts))
        except (TypeError, ValueError, RuntimeError):  # such as tensors of different lengths
            found = ()
        if not found or any(array.dtype == object for array in found):
            raise DataError(
                f"collate_fn of {self!r} returned a {type(batch).__name__}, {batch!r:.80}; "
                "expected a tuple of arrays or tensors with a row for each example; "
                f"{OTHER_BATCHES}"
            )
        return found

    def __repr__(self) -> str:
        return f"TorchDataset({self.dataset!r})"


class _Examples(Seeded):
    """Examples by number; not stacked, they are one array of objects."""

    def __init__(self, dataset: Any, stack: bool) -> None:
        self._dataset, self._stack = dataset, stack

    def __len__(self) -> int:
        return len(self._dataset)

    def take_seeded(self, indices: Array, seed: int, passes: Array) -> Batch:
        pairs = zip(indices.tolist(), passes.tolist(), strict=True)
        with generators_kept():
            examples = (self._example(index, [seed, number, index]) for index, number in pairs)
            if self._stack:
                return stacked(examples)
            array = np.empty(len(indices), object)
            for row, example in enumerate(examples):
                array[row] = example
            return (array,)

    def _example(self, index: int, seed: list[int]) -> Any:
        _seed(*seed)
        with user_code("__getitem__", self._dataset, DataError, lambda: f"It was example {index}"):
            return self._dataset[index]

    def __repr__(self) -> str:
        return f"{len(self)} of {type(self._dataset).__name__}"


def _seed(*seed: int) -> None:
    """Seed these generators."""
    one, two = np.random.SeedSequence(seed).generate_state(2).tolist()
    random.seed(one)
    np.random.seed(two)
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(one << 32 | two)
