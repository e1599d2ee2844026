"""Examples of a ``torch.utils.data.Dataset``, read in processes if ``num_workers`` is set."""

from __future__ import annotations

from typing import Any

import numpy as np

from zmqtrain.compute.generators import generators_kept, seed_generators
from zmqtrain.data.collate import Collate, collated
from zmqtrain.data.processes import Readers
from zmqtrain.data.subset import Seeded, stacked
from zmqtrain.errors import DataError
from zmqtrain.models.base import Array, Batch
from zmqtrain.user_code import user_code


class TorchDataset(Seeded):
    """A map-style data set of torch (``__len__`` and ``__getitem__``), with its transforms.

    ``num_workers``: processes that read the examples of a batch in parallel, see
    :class:`zmqtrain.data.Parallel`. ``collate_fn``: makes a batch of any kind from a list of
    examples, in this process; without it arrays are stacked, and those of dicts by name.

    The random numbers of torch, NumPy and ``random`` that transforms draw are seeded by the job's
    seed, the pass and the example; those of ``collate_fn`` by those of the batch's first one, only
    without ``num_workers``. Without ``num_workers`` they come from generators that a model
    may share, and whose states are restored: so nothing is read ahead then, and workers that are
    threads of one process disturb each other.
    """

    def __init__(
        self, dataset: Any, num_workers: int = 0, collate_fn: Collate | None = None
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
        is_read_ahead = self.may_be_read_ahead  # beside a model that draws random numbers, too
        seeds = None if is_read_ahead else [seed, int(passes[0]), int(indices[0])]
        return collated(self.collate_fn, arrays[0], self, seeds)

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
        seed_generators(*seed)
        with user_code("__getitem__", self._dataset, DataError, lambda: f"It was example {index}"):
            return self._dataset[index]

    def __repr__(self) -> str:
        return f"{len(self)} of {type(self._dataset).__name__}"
