"""Tables of a Keras model on jax: rows are read before a compiled step, which finds them by id."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import keras
import numpy as np
from jax import numpy as jnp

from zmqtrain.adapters.jax_tables import padded
from zmqtrain.adapters.keras_tables import TableLayer, whole_ids
from zmqtrain.errors import ConfigError
from zmqtrain.models.base import Parameters
from zmqtrain.models.rows import read_ahead, unique_ids
from zmqtrain.models.tables import Ids

_IDS = "(ids of {})"  # the name under which a step gets sorted ids


class LookedUp(NamedTuple):
    """The variables of a step with rows in place of tables, and the ids of these rows."""

    values: Parameters
    unique: Mapping[str, Ids]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of rows, for which a step is compiled."""
        return tuple(len(self.values[name]) for name in self.unique)


class JaxTables:
    """The tables of a network; one trace of its functions at a time uses them."""

    def __init__(self, tables: Mapping[str, TableLayer], model: Any, owner: object) -> None:
        """
        Raises:
            ConfigError: ids of a table are not known before the model runs.
        """
        self._tables = tables
        nodes = {
            name: [node.input_tensors[0] for node in table.layer._inbound_nodes]
            for name, table in tables.items()
        }
        try:
            self._ids = keras.Function(model._inputs_struct, nodes) if tables else None
        except (AttributeError, ValueError):
            raise ConfigError(
                f"tables of {owner!r}, {', '.join(tables)}, are looked up with ids that are not "
                "known before the model runs; expected a functional model, whose Embedding layers "
                "get what follows from keras.Input: or set KERAS_BACKEND to torch"
            ) from None

    def look_up(self, values: Parameters, inputs: Any) -> LookedUp:
        """Return the rows of a batch, read in one request.

        Raises:
            DataError: an id is none of its table's.
        """
        if self._ids is None:
            return LookedUp(values, {})
        unique = {}
        for name, arrays in self._ids(inputs).items():
            every = [whole_ids(np.asarray(each).ravel(), name) for each in arrays]
            unique[name], _ = unique_ids(values[name].variable, np.concatenate(every))
        read_ahead([(values[name], ids) for name, ids in unique.items()])
        found = dict(values)
        for name, ids in unique.items():
            found[name] = padded(values[name].rows(ids))
            among = np.full(len(found[name]), np.iinfo(np.int32).max, np.int32)
            among[: len(ids)] = ids
            found[_IDS.format(name)] = among
        return LookedUp(found, unique)

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Let layers be called in the block: for shapes alone, and for rows after :meth:`use`."""
        for table in self._tables.values():
            table.look_up = partial(_of_shape, table.layer.output_dim)
        try:
            yield
        finally:
            for table in self._tables.values():
                table.look_up = None

    def use(self, values: Mapping[str, Any]) -> None:
        """Have the layers look rows up in these values, while a function is traced."""
        for name, table in self._tables.items():
            table.look_up = partial(_found_in, values[name], values[_IDS.format(name)])


def _of_shape(dim: int, ids: Any) -> Any:
    return jnp.zeros((*ids.shape, dim), np.float32)


def _found_in(rows: Any, among: Any, ids: Any) -> Any:
    return rows[jnp.searchsorted(among, ids.astype(jnp.int32))]
