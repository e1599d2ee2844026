"""The place of every element of every variable: variables, slices of them, shards of slices.

A *variable* is a named array of the model, trained or state. A *slice* is a run of its rows (along
axis 0) that one ps holds; a variable that is not partitioned is one slice. A *shard* is all slices
of one ps in one flat float32 array: first the trained ones, so that an update is one pass over
memory, then the state. A slice may be on several shards: one of them owns it, the others hold
copies. The *run* of a slice is the elements that carry it. An update cuts the array otherwise: a
*part* is what one thread changes, a *block* of it what is changed between two words of progress.

State of another dtype is carried in float32 elements, too: float16 as numbers of the same value,
every other dtype byte by byte, each byte as a number from 0 to 255. So nothing is lost, and neither
checks for NaN nor floating-point registers can harm it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Final, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from zmqtrain.compute.arrays import ALIGNMENT_NBYTES, Flat

ITEM_NBYTES = 4  # float32, the dtype of trained variables and of a shard
ALIGNMENT = ALIGNMENT_NBYTES // ITEM_NBYTES  # elements; slices begin at multiples of it

Kind: TypeAlias = Literal["trained", "state", "frozen"]

Dtype: TypeAlias = Literal[
    "float16", "float32", "float64", "bool",
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
]  # fmt: skip
"""Dtypes of state and of frozen variables; trained ones are float32."""

DTYPES: Final[tuple[str, ...]] = get_args(Dtype)

AVERAGED: Final = frozenset({"float16", "float32"})
"""Dtypes of state that is averaged over the gradients of an update."""

CARRIED_BY_BYTE: Final = frozenset(DTYPES) - AVERAGED
"""Dtypes of state that is carried byte by byte; an update takes its first gradient's value."""


@dataclass(frozen=True, slots=True)
class Variable:
    """A named array of the model: full shape, NumPy dtype by name, kind; in creation order.

    Frozen variables are in checkpoints only, on no shard.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    kind: Kind = "trained"

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of memory in a shard."""
        return self.size * self.width * ITEM_NBYTES

    @property
    def place(self) -> int:
        """Sort key on a shard: trained variables first, then averaged state, then the rest."""
        return 0 if self.kind == "trained" else 1 if self.dtype in AVERAGED else 2

    @property
    def width(self) -> int:
        """Elements of a shard that carry one element."""
        return np.dtype(self.dtype).itemsize if self.dtype in CARRIED_BY_BYTE else 1


@dataclass(frozen=True, slots=True)
class Slice:
    """Rows ``start .. start + rows`` of a variable, at ``offset`` elements into its shard.

    A 0-d variable is one slice with ``start`` 0 and ``rows`` 1. ``copy``: another shard owns it.
    """

    variable: Variable
    start: int
    rows: int
    offset: int
    copy: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.rows, *self.variable.shape[1:]) if self.variable.shape else ()

    @property
    def size(self) -> int:
        """Elements of the shard that carry it."""
        return prod(self.shape) * self.variable.width

    @property
    def end(self) -> int:
        return self.offset + self.size

    @property
    def nbytes(self) -> int:
        return self.size * ITEM_NBYTES

    def of(self, value: Any) -> Any:
        """Cut this slice out of the whole variable's value (a view where the array allows it)."""
        return value[self.start : self.start + self.rows] if self.variable.shape else value

    def run(self, flat: Any) -> Any:
        """Return the elements of the shard's flat array that carry this slice, as a view."""
        return flat[self.offset : self.end]

    def value(self, flat: Any) -> Any:
        """Return this slice's value, a view of ``flat`` if the variable is float32."""
        run = self.run(flat)
        if self.variable.dtype != "float32":
            value = np.empty_like(flat, self.variable.dtype, shape=self.shape)
            decode(run, value)
            return value
        return run.reshape(self.shape)


@dataclass(frozen=True, slots=True)
class RowSlice:
    """The rows of all tables that belong to shard ``owner``; ``copy``: as in :class:`Slice`."""

    owner: int
    copy: bool = False


@dataclass(frozen=True)
class ShardLayout:
    """The slices of one shard, in order; equal on every task of the cluster.

    ``rows``: () unless rows of tables have copies; else each shard has its own.
    """

    shard: int
    slices: tuple[Slice, ...]
    rows: tuple[RowSlice, ...] = ()

    @property
    def parts(self) -> tuple[Slice | RowSlice, ...]:
        """All that may be a copy."""
        return (*self.slices, *self.rows)

    @cached_property
    def size(self) -> int:
        """Elements in the shard's flat array."""
        return self.slices[-1].end if self.slices else 0

    @cached_property
    def runs(self) -> tuple[tuple[Slice, int, int], ...]:
        """Each slice, and from where to where it lies with the zeros up to the next one."""
        following = [*(cut.offset for cut in self.slices[1:]), self.size]
        return tuple(
            (cut, cut.offset, stop) for cut, stop in zip(self.slices, following, strict=False)
        )

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The trained variables that it holds slices of, numbered in their order."""
        trained = [cut.variable.name for cut in self.slices if cut.variable.kind == "trained"]
        return {name: number for number, name in enumerate(dict.fromkeys(trained))}

    def numbers_of(self, names: Collection[str]) -> tuple[int, ...]:
        """Return the numbers of those of these variables that it holds slices of."""
        return tuple([self.numbers[name] for name in names if name in self.numbers])

    @cached_property
    def trained(self) -> int:
        """Elements of trained variables, which come first."""
        return max((stop for cut, _, stop in self.runs if cut.variable.place == 0), default=0)

    @cached_property
    def averaged(self) -> int:
        """End of the averaged elements; behind it the first gradient's values count."""
        return max((stop for cut, _, stop in self.runs if cut.variable.place <= 1), default=0)

    @cached_property
    def owned(self) -> slice:
        """The elements from the first to the last slice that is not a copy."""
        return _span([cut for cut in self.slices if not cut.copy])

    @cached_property
    def owned_trained(self) -> slice:
        """Those of trained variables among the owned elements."""
        return _span([c for c in self.slices if not c.copy and c.variable.kind == "trained"])

    @property
    def nbytes(self) -> int:
        """Bytes of the owned slices, which add up to the model's over all shards."""
        return sum(cut.nbytes for cut in self.slices if not cut.copy)

    def gather(self, values: Mapping[str, Any], out: Flat) -> None:
        """Write this shard's part of whole variables into ``out`` (float32, shape (size,))."""
        for cut in self.slices:
            value = np.asarray(values[cut.variable.name], cut.variable.dtype)
            encode(cut.of(value), cut.run(out))

    def scatter(self, flat: Flat, values: Mapping[str, Any]) -> None:
        """Write its own slices of ``flat`` (float32, shape (size,)) into whole variables."""
        for cut in self.slices:
            if not cut.copy:
                decode(cut.run(flat), cut.of(values[cut.variable.name]))

    def flat_of(self, values: Mapping[str, Any]) -> Flat:
        """Return this shard's part of whole variables as a new array of shape (size,)."""
        flat = np.zeros(self.size, np.float32)
        self.gather(values, flat)
        return flat


def _span(slices: Sequence[Slice]) -> slice:
    return slice(slices[0].offset, slices[-1].end) if slices else slice(0, 0)


def variables_of(values: Mapping[str, Any], kind: Kind = "trained") -> tuple[Variable, ...]:
    """Return the variables of these values, in their order."""
    return tuple(
        Variable(name, tuple(value.shape), value.dtype.name, kind) for name, value in values.items()
    )


def empty_values(variables: Sequence[Variable]) -> dict[str, NDArray[Any]]:
    """Return an uninitialised array for each variable."""
    return {v.name: np.empty(v.shape, v.dtype) for v in variables}


def encode(value: Any, out: Any) -> None:
    """Write an array into the float32 elements that carry it, in C order."""
    if value.dtype.name in CARRIED_BY_BYTE:
        value = value.reshape(-1).view(np.uint8)
    out[...] = value.reshape(out.shape)


def decode(run: Any, out: Any) -> None:
    """Decode float32 elements into a C-contiguous array of the variable's dtype."""
    if out.dtype.name in CARRIED_BY_BYTE:
        run = run.astype(np.uint8).view(out.dtype)
    out[...] = run.reshape(out.shape)
