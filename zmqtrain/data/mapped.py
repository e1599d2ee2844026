"""Examples transformed by a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from zmqtrain.data.coerce import as_dataset
from zmqtrain.data.subset import Seeded, check_rows, stacked, take_seeded
from zmqtrain.errors import DataError
from zmqtrain.models.base import Array, Batch
from zmqtrain.user_code import parameters_of, user_code


class Mapped(Seeded):
    """A data set whose examples a function transforms: ``map`` of other libraries.

    ``function(features, label)`` gets the arrays of one example and returns those of the new one:
    a tuple of arrays or numbers, or a single one. If it has a parameter ``rng``, that is a
    ``numpy.random.Generator`` seeded by the job's seed, the pass and the example: each pass is
    augmented differently, and a batch that is computed again is the same.
    """

    def __init__(self, examples: Any, function: Callable[..., Any]) -> None:
        """``examples``: a tuple of arrays, a Dataset, or one of torch."""
        super().__init__(as_dataset(examples))
        self.function = function
        self._is_random = "rng" in parameters_of(function)

    def take_seeded(self, indices: Array, seed: int, passes: Array) -> Batch:
        batch = take_seeded(self.dataset, indices, seed, passes)
        check_rows(batch, self.dataset, "Mapped transforms rows: transform what is collated")
        rows = zip(*batch, strict=True)
        return stacked(
            self._call(row, int(index), [seed, int(number)])
            for row, index, number in zip(rows, indices, passes, strict=True)
        )

    def _call(self, row: tuple[Array, ...], index: int, seed: list[int]) -> Any:
        more = {"rng": np.random.default_rng([*seed, index])} if self._is_random else {}
        with user_code("the function", self, DataError, lambda: f"It was example {index}"):
            return self.function(*row, **more)

    def __repr__(self) -> str:
        name = getattr(self.function, "__qualname__", type(self.function).__name__)
        return f"Mapped({self.dataset!r}, {name})"
