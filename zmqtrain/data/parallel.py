"""Examples that several processes read: for decoding and augmentation that take their time."""

from __future__ import annotations

from typing import Any

from zmqtrain.data.coerce import as_dataset
from zmqtrain.data.processes import Readers
from zmqtrain.data.subset import Seeded
from zmqtrain.models.base import Array, Batch


class Parallel(Seeded):
    """A data set of which ``processes`` read a share of each batch.

    They are forked when the first batch is read. They end with their parent, however it ends, once
    they have read what they are reading.
    """

    may_be_read_ahead = True  # whatever they read

    def __init__(self, examples: Any, processes: int) -> None:
        """``examples``: a tuple of arrays, a Dataset, or one of torch.

        Raises:
            ConfigError: ``processes`` is below 1.
        """
        super().__init__(as_dataset(examples))
        self.processes = processes
        self._readers = Readers(self.dataset, processes)

    def take_seeded(self, indices: Array, seed: int, passes: Array) -> Batch:
        return self._readers.take_seeded(indices, seed, passes)

    def __repr__(self) -> str:
        return f"Parallel({self.dataset!r}, {self.processes})"
