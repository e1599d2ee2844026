"""The examples of each batch, which every task computes alike."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from zmqtrain.data.arrays import check_seed
from zmqtrain.errors import ConfigError, DataError


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The batches of a job, numbered from 0 without end.

    A pass is one shuffled order of all examples. The passes are concatenated, and batch b covers
    positions b * batch_size .. (b + 1) * batch_size - 1. So every batch is full, a batch may cross
    the border between two passes, and each example occurs exactly once in each pass.

    ``exact``: no batch crosses such a border; the last batch of a pass may be shorter.

    Raises:
        DataError: there are no examples.
        ConfigError: ``batch_size`` is below 1 or ``seed`` negative.
    """

    examples: int
    batch_size: int
    seed: int
    exact: bool = False

    def __post_init__(self) -> None:
        if self.examples < 1:
            raise DataError(
                f"the training set has {self.examples} examples; expected at least 1; "
                "check what the job's data loads"
            )
        if self.batch_size < 1:
            raise ConfigError(
                f"batch_size is {self.batch_size}; expected at least 1; correct it in the job"
            )
        check_seed(self.seed)

    @property
    def of_pass(self) -> int:
        """Number of batches in an exact pass."""
        return -(-self.examples // self.batch_size)

    def rows(self, number: int) -> int:
        """Return the number of examples in batch ``number``."""
        if not self.exact:
            return self.batch_size
        return min(self.batch_size, self.examples - number % self.of_pass * self.batch_size)

    def passes(self, number: int) -> NDArray[np.int64]:
        """Return the pass of each example of batch ``number``, int64, from 0 on."""
        if self.exact:
            return np.full(self.rows(number), number // self.of_pass)
        start = number * self.batch_size
        return np.arange(start, start + self.batch_size) // self.examples

    def indices(self, number: int) -> NDArray[np.int64]:
        """Return the examples of batch ``number`` (>= 0), int64 (batch_size,), or fewer."""
        if self.exact:
            pass_number, place = divmod(number, self.of_pass)
            start = place * self.batch_size
            order = _order(self.seed, pass_number, self.examples)
            return order[start : start + self.batch_size].copy()
        batch = np.empty(self.batch_size, np.int64)
        position, filled = number * self.batch_size, 0
        while filled < self.batch_size:
            pass_number, start = divmod(position + filled, self.examples)
            order = _order(self.seed, pass_number, self.examples)
            run = order[start : start + self.batch_size - filled]
            batch[filled : filled + run.size] = run
            filled += run.size
        return batch


# Tasks of one process and neighbouring batches share the last few passes.
@lru_cache(maxsize=4)
def _order(seed: int, pass_number: int, examples: int) -> NDArray[np.int64]:
    """Return the order of one pass; it is shared, so it must not be written to."""
    return np.random.Generator(np.random.PCG64([seed, pass_number])).permutation(examples)
