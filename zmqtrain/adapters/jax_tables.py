"""Tables of a JAX model: unique rows enter a compiled step, which gathers the rows of its ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from zmqtrain.errors import ConfigError
from zmqtrain.models.base import Batch, Gradients, Parameters
from zmqtrain.models.rows import read_ahead, unique_ids
from zmqtrain.models.tables import Ids, Initial, Rows, Table

Tree: TypeAlias = Any

PLACES = "(places)"
"""The name under which a step gets the places of ids among the unique rows."""

_SMALLEST = 64  # rows of a step


@dataclass(frozen=True)
class TableOf:
    """A table of a JaxModel, which finds rows of it in its parameters, under the table's name.

    ``ids(batch)`` returns the ids of a batch, integers of any shape, or a pytree of such arrays;
    the model gets their rows, of shape (*, ``dim``). It is not compiled. Of a prediction it gets
    the batch without labels. Arrays of the batch that are ids are then their places among the
    unique ones of the batch, so that ids need not fit into 32 bits.

    ``rows``: number of rows; None: any int64 is an id. ``initial``: the values of rows that were
    never trained; None: ``Uniform(0.05)``.
    """

    dim: int
    ids: Callable[[Batch], Tree]
    rows: int | None = None
    initial: Initial | None = None

    def table(self) -> Table:
        return Table(dim=self.dim, rows=self.rows, initial=self.initial)


class LookedUp(NamedTuple):
    """The rows of a batch: by table its sorted unique ids, their rows and more rows of 0, and for
    each id its place among them; and the batch with places instead of ids."""

    ids: dict[str, Tree]
    unique: dict[str, Ids]
    rows: dict[str, Rows]
    places: dict[str, Tree]
    batch: Batch

    def values(self, parameters: Parameters) -> dict[str, Any]:
        """Return the parameters of a step with rows in place of tables."""
        places = {PLACES: self.places} if self.places else {}
        return {**parameters, **self.rows, **places}


def take_gradients(unique: Mapping[str, Ids], results: dict[str, Any], out: Gradients) -> None:
    """Move the gradients of unique rows from a step's results to those of the tables."""
    for name, ids in unique.items():
        out[name].add_unique(ids, np.asarray(results.pop(name))[: len(ids)])


def look_up(tables: Mapping[str, TableOf], parameters: Parameters, batch: Batch) -> LookedUp:
    """Return the rows of a batch, read in one request.

    Raises:
        DataError: an id is not an integer, or not one of its table's.
        ConfigError: the parameters have no rows of a table.
    """
    if missing := [name for name in tables if name not in parameters]:
        raise ConfigError(
            f"these weights have no rows of the table {missing[0]!r}; expected those that a run "
            "returns (Summary.parameters): weights of a logdir are without the rows of tables"
        )
    found = LookedUp({}, {}, {}, {}, batch)
    at: dict[int, Any] = {}  # the places of the ids that an array of the batch holds
    for name, table in tables.items():
        leaves, structure = jax.tree.flatten(table.ids(batch))
        arrays = [np.asarray(leaf) for leaf in leaves]
        flat = np.concatenate([array.ravel() for array in arrays]) if arrays else np.zeros(0, int)
        unique, places = unique_ids(parameters[name].variable, flat)
        ends = np.cumsum([array.size for array in arrays])[:-1]
        parts = np.split(places.astype(np.int32), ends)
        shaped = [part.reshape(array.shape) for part, array in zip(parts, arrays, strict=True)]
        at |= zip(map(id, leaves), shaped, strict=True)
        found.ids[name], found.unique[name] = jax.tree.unflatten(structure, arrays), unique
        found.places[name] = jax.tree.unflatten(structure, shaped)
    read_ahead([(parameters[name], unique) for name, unique in found.unique.items()])
    for name, unique in found.unique.items():
        found.rows[name] = padded(parameters[name].rows(unique))
    if not at:
        return found
    return found._replace(batch=jax.tree.map(lambda leaf: at.get(id(leaf), leaf), batch))


def gathered(names: Mapping[str, TableOf], values: Mapping[str, Any], tree: Tree) -> Tree:
    """Return the parameters of a model's functions with the rows of each table's ids.

    Raises:
        ConfigError: they are not a dict, or have a table's name.
    """
    if not names:
        return tree
    if not isinstance(tree, dict) or (tree.keys() & names.keys()):
        raise ConfigError(
            f"init returned {_described(tree)}; expected a dict of parameters without "
            f"{', '.join(names)}: the rows of tables are added to it"
        )

    def rows_of(name: str) -> Tree:
        return jax.tree.map(lambda places: values[name][places], values[PLACES][name])

    return tree | {name: rows_of(name) for name in names}


def _described(tree: Tree) -> str:
    names = f" of {', '.join(map(str, tree))}" if isinstance(tree, dict) else ""
    return f"a {type(tree).__name__}{names}"


def padded(rows: Rows) -> Rows:
    """Return rows followed by zeros, so that the steps of many batches have the same shape."""
    size = _SMALLEST
    while size < len(rows):
        size = size * 5 // 4
    padded = np.zeros((size, rows.shape[1]), np.float32)
    padded[: len(rows)] = rows
    return padded
