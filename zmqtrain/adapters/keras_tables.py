"""Tables of a Keras model: embeddings that a job names, of which a step reads and trains rows.

Such a variable leaves its layer, whose ``call`` then looks rows up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np
from numpy.typing import NDArray

from zmqtrain.errors import ConfigError, DataError
from zmqtrain.models.tables import Given, Ids, Table
from zmqtrain.optim.groups import Pattern, fits

LookUp: TypeAlias = Callable[[Any], Any]
"""Returns the rows of a tensor of ids, which are floats if an Input has no other dtype."""


def whole_ids(ids: NDArray[Any], name: str) -> Ids:
    """Return the ids of a table as int64, if no two of them can have become the same float.

    Raises:
        DataError: they are floats that are not whole numbers, or too large for their dtype.
    """
    if ids.dtype.kind == "f" and ids.size:
        bound = 2.0 ** (np.finfo(ids.dtype).nmant + 1)
        wrong = ids[(ids != np.floor(ids)) | (np.abs(ids) >= bound)]
        if wrong.size:
            raise DataError(
                f"the table {name!r} is given id {wrong[0]:.17g} of {ids.dtype}; expected an "
                'integer: give keras.Input(..., dtype="int64"), or correct the data'
            )
    return ids.astype(np.int64)


class TableLayer:
    """An Embedding layer whose rows are a table."""

    def __init__(self, layer: Any, name: str, owner: object) -> None:
        """
        Raises:
            ConfigError: the layer needs all rows, or does not train them.
        """
        self._check(layer, name, owner)
        rows = np.asarray(keras.ops.convert_to_numpy(layer._embeddings))
        self.layer = layer
        self.table = Table(rows=layer.input_dim, dim=layer.output_dim, initial=Given(rows))
        layer._tracker.unlock()
        layer._untrack_variable(layer._embeddings)
        layer._tracker.lock()
        layer._embeddings = None
        layer.call = self._call
        self.look_up: LookUp | None = None

    def _call(self, inputs: Any) -> Any:
        if self.look_up is None:
            raise ConfigError(
                f"the rows of {self.layer.name!r} are in a table; expected a prediction by the "
                "job or the trainer, or a model of its own by with_weights()"
            )
        return keras.ops.cast(self.look_up(inputs), self.layer.compute_dtype)

    @staticmethod
    def _check(layer: Any, name: str, owner: object) -> None:
        needs = {
            "trainable=False": not layer.trainable,
            f"dtype {layer.variable_dtype}": layer.variable_dtype != "float32",
            "an embeddings_regularizer": layer.embeddings_regularizer is not None,
            "LoRA": layer.lora_enabled,
            "a quantization": layer.quantization_mode is not None,
        }
        if found := [what for what, is_there in needs.items() if is_there]:
            raise ConfigError(
                f"the table {name!r} of {owner!r} is of a layer with {' and '.join(found)}; "
                "expected float32 rows that are trained by themselves: leave it out, or the table"
            )


def take_tables(
    model: Any, variables: Mapping[str, Any], patterns: Sequence[Pattern], owner: object
) -> dict[str, TableLayer]:
    """Make tables of the embeddings whose names fit a pattern; return them by name.

    Raises:
        ConfigError: one cannot be a table.
    """
    layers = [one for one in model._flatten_layers() if isinstance(one, keras.layers.Embedding)]
    by_id = {id(getattr(layer, "_embeddings", None)): layer for layer in layers}
    return {
        name: TableLayer(by_id[id(variable)], name, owner)
        for name, variable in variables.items()
        if id(variable) in by_id and any(fits(name, pattern) for pattern in patterns)
    }
