"""Tables: variables of rows, of which a batch reads and trains only some.

A table has ``rows`` rows, or takes any int64 as an id. A row that was never trained has no memory:
its value follows from the job's seed, the table's name and the id, so every task, life and number
of ps has the same one, and reading changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import inf
from numbers import Real
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from zmqtrain.errors import ConfigError

Ids: TypeAlias = NDArray[np.int64]
"""Ids of rows, of shape (n,)."""

Rows: TypeAlias = NDArray[np.float32]
"""Rows of a table, of shape (n, dim)."""

Places: TypeAlias = NDArray[np.int64]
"""Numbers of the records of rows, of shape (n,)."""

MOST_COUNTED = 1 << 16
"""Gradients of a row that are counted before it is admitted, at most."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_PARTS = 12  # uniform numbers in the sum that stands for a normal one


class Found(NamedTuple):
    """Where a task has found rows in the memory of a shard: their ``places``, -1 for none.

    It is right until the shard forgets a row of the table: ``sweeps`` says how often it had before.
    """

    sweeps: int
    places: Places


@dataclass(frozen=True, slots=True)
class RowsOf:
    """Rows of one table: sorted unique ``ids``, shape (n,), and ``rows``, shape (n, dim)."""

    table: int  # its number
    ids: Ids
    rows: Rows
    found: Found | None = None  # in the memory of a shard; None: it is not known where


class Initial(Protocol):
    """Values of rows that were never trained. Its ``repr`` is part of the job's fingerprint."""

    def rows(self, key: int, ids: Ids, dim: int) -> Rows:
        """Return the rows; ``key`` is that of the job's seed and the table, see :func:`key_of`."""


@dataclass(frozen=True)
class Uniform:
    """Elements uniform in [-limit, limit), as Keras's Embedding has them with limit 0.05."""

    limit: float = 0.05

    def __post_init__(self) -> None:
        _check_scale(self, "limit")

    def rows(self, key: int, ids: Ids, dim: int) -> Rows:
        top = (_words(key, ids, dim) >> np.uint64(40)).astype(np.float32)
        return (top * np.float32(2.0**-23) - np.float32(1)) * np.float32(self.limit)


@dataclass(frozen=True)
class Normal:
    """Elements of mean 0 and this standard deviation; torch's Embedding uses 1.

    Each is the sum of twelve uniform numbers, none further than 6 standard deviations from 0: whole
    numbers are the same on every processor, logarithms are not.
    """

    std: float = 1.0

    def __post_init__(self) -> None:
        _check_scale(self, "std")

    def rows(self, key: int, ids: Ids, dim: int) -> Rows:
        words = _words(key, ids, 3 * dim).view(np.uint16).reshape(len(ids), dim, _PARTS)
        centred = words.sum(axis=2, dtype=np.int64) - _PARTS * (2**16 - 1) // 2
        rows: Rows = centred.astype(np.float32) * np.float32(self.std / 2**16)
        return rows


def _check_scale(owner: Initial, name: str) -> None:
    """Check that an attribute is a finite number of at least 0."""
    value = getattr(owner, name)
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < inf:
        raise ConfigError(
            f"{type(owner).__name__}: {name} is {value!r}; expected a finite number of at least 0; "
            f"correct {name} in the job"
        )


@dataclass(frozen=True, eq=False)
class Given:
    """The rows of an array of shape (rows, dim): the weight that a framework has made."""

    array: Rows = field(repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "array", np.asarray(self.array, np.float32))

    def rows(self, key: int, ids: Ids, dim: int) -> Rows:
        rows: Rows = self.array[ids]
        return rows


@dataclass(frozen=True, eq=False)
class Trained:
    """Rows that a job has trained, and the others of its table as they began."""

    of: RowsOf = field(repr=False)
    variable: TableVariable

    def rows(self, key: int, ids: Ids, dim: int) -> Rows:
        rows = np.empty((len(ids), dim), np.float32)
        is_trained = np.zeros(len(ids), bool)
        if len(self.of.ids):
            at = np.minimum(np.searchsorted(self.of.ids, ids), len(self.of.ids) - 1)
            is_trained = self.of.ids[at] == ids
            rows[is_trained] = self.of.rows[at[is_trained]]
        if not is_trained.all():
            rows[~is_trained] = self.variable.initial_rows(ids[~is_trained])
        return rows


@dataclass(frozen=True)
class Table:
    """Options of the tables whose names fit a pattern: ``Job(tables={"user*": Table(...)})``.

    ``optimizer``: the rule of its rows; None: the job's. ``rows``: number of rows, whose ids are
    below it; None: the model's number, else any int64 is an id. ``dim``: elements of a row; None:
    the model's number. ``initial``: values of rows that were never trained; None: the model's,
    else ``Uniform(0.05)``. A row is trained from its gradient number ``admit_after`` + 1 on.
    ``forget_after``: updates after which a row that none of them has trained is forgotten, or up to
    a quarter more; ``max_rows``: trained rows that are kept, those trained last; each ps has its
    share of them, and keeps 15 of 16 when they are more.

    Raises:
        ConfigError: a number is impossible.
    """

    optimizer: Any = None
    rows: int | None = None
    dim: int | None = None
    initial: Initial | None = None
    admit_after: int = 0
    forget_after: int | None = None
    max_rows: int | None = None

    def __post_init__(self) -> None:
        for name in ("rows", "dim", "admit_after", "forget_after", "max_rows"):
            if isinstance(getattr(self, name), np.integer):
                object.__setattr__(self, name, int(getattr(self, name)))
        ranges = {"admit_after": (0, MOST_COUNTED - 1), "forget_after": (1, None)}
        for name, (least, most) in (ranges | {"max_rows": (1, None)}).items():
            value = getattr(self, name)
            if value is None and most is None:
                continue
            if type(value) is not int or value < least or (most is not None and value > most):
                up_to = f"from {least} on" if most is None else f"from {least} to {most}"
                raise ConfigError(
                    f"Table: {name} is {value!r}; expected a whole number {up_to}; correct {name} "
                    "in the job"
                )


@dataclass(frozen=True)
class TableVariable:
    """A table of a model; ``number``: its place among them. See :class:`Table`."""

    name: str
    number: int
    dim: int
    rows: int | None
    initial: Initial = field(compare=False)
    key: int = 0
    admit_after: int = 0
    forget_after: int | None = None
    max_rows: int | None = None

    def initial_rows(self, ids: Ids) -> Rows:
        """Return the rows with these ids as they are before they are trained."""
        return self.initial.rows(self.key, ids, self.dim)


def key_of(seed: int, name: str) -> int:
    """Return 64 bits that a job's seed and the name of a table determine."""
    return int.from_bytes(blake2b(f"{seed} {name}".encode(), digest_size=8).digest(), "little")


def mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return 64 bits for each word, all of which depend on all of its bits.

    The finaliser of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators,
    2014, with the constants of Stafford's variant 13).
    """
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def shards_of(ids: Ids, shards: int) -> NDArray[np.int64]:
    """Return the shard that holds each row, shape (n,): a hash of the id modulo ``shards``."""
    high = mixed(ids.view(np.uint64) + _GOLDEN) >> np.uint64(32)
    return ((high * np.uint64(shards)) >> np.uint64(32)).astype(np.int64)


def owned_by(owners: Sequence[int], shards: int, ids: Ids) -> NDArray[np.bool_]:
    """Return which rows belong to one of these shards, shape (n,)."""
    return np.isin(shards_of(ids, shards), owners)


class RowPlace(NamedTuple):
    """The rows that a shard holds: its own of ``shards``, and those of ``copies - 1`` before it.

    The first shard follows the last, as in ``with_copies`` of store/placement.py.
    """

    shard: int = 0
    shards: int = 1
    copies: int = 1

    def holds(self, owners: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which rows of these owners (see :func:`shards_of`) it holds, shape (n,)."""
        held: NDArray[np.bool_] = (self.shard - owners) % self.shards < self.copies
        return held


WHOLE = RowPlace()
"""Of a shard that holds all rows."""


def _words(key: int, ids: Ids, count: int) -> NDArray[np.uint64]:
    """Return random words, shape (n, count)."""
    begin = mixed(ids.view(np.uint64) ^ np.uint64(key))
    steps = np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
    return mixed(begin[:, None] + steps)
