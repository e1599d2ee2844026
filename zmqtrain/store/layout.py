"""The place of every element of every parameter: variables, slices of them, shards of slices.

A *variable* is a named parameter of the model. A *slice* is a run of its rows (along axis 0) that
one ps holds; a variable that is not partitioned is one slice. A *shard* is all slices of one ps,
laid end to end in one flat float32 array, so that an update is one pass over memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

ITEM_NBYTES = 4  # float32, the one dtype of parameters


@dataclass(frozen=True, slots=True)
class Variable:
    """A named parameter of the model: its full shape, in the model's creation order."""

    name: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * ITEM_NBYTES


@dataclass(frozen=True, slots=True)
class Slice:
    """Rows ``start .. start + rows`` of a variable, at ``offset`` elements into its shard.

    A 0-d variable is always one slice with ``start`` 0 and ``rows`` 1.
    """

    variable: Variable
    start: int
    rows: int
    offset: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the slice itself."""
        return (self.rows, *self.variable.shape[1:]) if self.variable.shape else ()

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * ITEM_NBYTES

    def of(self, value: Any) -> Any:
        """Cut this slice out of the whole variable's value (a view where the array allows it)."""
        return value[self.start : self.start + self.rows] if self.variable.shape else value


@dataclass(frozen=True)
class ShardLayout:
    """What one ps holds, in order; equal on every task of the cluster."""

    shard: int
    slices: tuple[Slice, ...]

    @cached_property
    def size(self) -> int:
        """Elements in the shard's flat array."""
        return sum(cut.size for cut in self.slices)

    @property
    def nbytes(self) -> int:
        return self.size * ITEM_NBYTES

    def views(self, flat: Any) -> list[Any]:
        """Return each slice of ``flat`` (float32, shape (size,)) as a view of its own shape."""
        return [flat[cut.offset : cut.offset + cut.size].reshape(cut.shape) for cut in self.slices]

    def gather(self, values: Mapping[str, Any], out: NDArray[np.float32]) -> None:
        """Copy this shard's part of whole variables into ``out`` (float32, shape (size,))."""
        for cut, view in zip(self.slices, self.views(out), strict=True):
            view[...] = cut.of(values[cut.variable.name])

    def scatter(self, flat: NDArray[np.float32], values: Mapping[str, Any]) -> None:
        """Copy ``flat`` (float32, shape (size,)) into this shard's part of whole variables."""
        for cut, view in zip(self.slices, self.views(flat), strict=True):
            cut.of(values[cut.variable.name])[...] = view


def variables_of(parameters: Mapping[str, Any]) -> tuple[Variable, ...]:
    """Return the variables of a model's initial parameters, in creation order."""
    return tuple(Variable(name, tuple(value.shape)) for name, value in parameters.items())


def empty_values(variables: Sequence[Variable]) -> dict[str, NDArray[np.float32]]:
    """Return an uninitialised float32 array for each variable."""
    return {v.name: np.empty(v.shape, np.float32) for v in variables}
