"""Examples that several processes read: for slow decoding and augmentation."""

from __future__ import annotations

from typing import Any

from zmqtrain.data.coerce import as_dataset
from zmqtrain.data.processes import Readers


class Parallel(Readers):
    """A data set of which ``processes`` each read a share of a batch.

    They are forked when the first batch is read. They end with their parent, however it ends, once
    they have finished their current read.
    """

    may_be_read_ahead = True  # whatever they read

    def __init__(self, examples: Any, processes: int) -> None:
        """``examples``: a tuple of arrays, a Dataset, or one of torch.

        Raises:
            ConfigError: ``processes`` is below 1.
        """
        super().__init__(as_dataset(examples), processes)

    def __repr__(self) -> str:
        return f"Parallel({self.dataset!r}, {self.processes})"
