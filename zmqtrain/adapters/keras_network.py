"""A built Keras model, its variables by name, batches as it takes them, and trained weights."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import keras
import numpy as np
from keras.src.backend import get_keras_mask
from numpy.typing import NDArray

from zmqtrain.adapters.keras_metrics import CompiledMeasure, array_of, is_mean, measures_of
from zmqtrain.adapters.keras_optimizers import give_state
from zmqtrain.adapters.keras_tables import take_tables
from zmqtrain.errors import CheckpointError, ConfigError
from zmqtrain.models.base import Batch
from zmqtrain.models.checks import check_rows
from zmqtrain.models.rows import TableReader
from zmqtrain.optim.groups import Pattern
from zmqtrain.store.weights import checkpoint_at, difference, load

Weights: TypeAlias = dict[str, NDArray[Any]]

log = logging.getLogger(__name__)


class Network:
    """A built model, and its variables by name."""

    def __init__(
        self, model: Any, seed: int, owner: object, patterns: Sequence[Pattern] = ()
    ) -> None:
        """``patterns``: names of embeddings that are tables.

        Raises:
            ConfigError: the model has no variables yet, or one cannot be a table.
        """
        self.model, self.owner = model, owner
        self.initial_seed: int | None = seed  # while the variables have their initial values
        self.optimizer = model.optimizer
        model.optimizer = None  # it would make slots
        if not all(layer.built for layer in model._flatten_layers()):
            raise ConfigError(
                f"the model of {owner!r} has no variables yet; begin it with keras.Input(shape), "
                "or call it on a batch in build"
            )
        self.variables = named(model.variables)
        self.tables = take_tables(model, self.variables, patterns, owner)
        self.variables = {n: v for n, v in self.variables.items() if n not in self.tables}
        fixed = _ids_of_frozen(model)
        trained = {id(variable) for variable in model.trainable_variables}
        self.trained = {n: v for n, v in self.variables.items() if id(v) in trained}
        self.frozen = {n: v for n, v in self.variables.items() if id(v) in fixed}
        kinds = self.trained.keys() | self.frozen.keys()
        self.state = {n: v for n, v in self.variables.items() if n not in kinds}
        self.computer = _computer(self, owner)  # copies of the owner that share this share it
        self._inputs_like = getattr(model, "_inputs_struct", None)
        self.outputs_like = getattr(model, "_outputs_struct", None)
        inputs = [one.name for one in getattr(model, "inputs", None) or ()]
        self.inputs = _names(self._inputs_like, inputs)
        self.outputs = _names(self.outputs_like, getattr(model, "output_names", ()))
        own_loss = type(model).compute_loss is not keras.Model.compute_loss
        self._needs_targets = model.loss is not None and not own_loss
        self.measures = measures_of(model._compile_metrics, self.outputs)
        masks = map(get_keras_mask, getattr(model, "outputs", None) or ())
        self.mask_axes = [None if mask is None else len(mask.shape) for mask in masks]

    def assign(self, weights: Mapping[str, Any]) -> None:
        """
        Raises:
            ConfigError: the rows of a table are not among the weights.
        """
        for name, variable in self.variables.items():
            if name not in weights:
                raise ConfigError(
                    f"there are no rows of the table {name!r} of {self.owner!r} here; expected "
                    "those of a training that has ended"
                )
            variable.assign(whole(weights[name]))

    def is_summed(self, measure: CompiledMeasure) -> bool:
        """Return whether a measure is not a mean over all examples."""
        is_masked = any(axes for axes in self.mask_axes[measure.output : measure.output + 1])
        return measure.is_weighted or is_masked or not is_mean(measure.metric)

    def check_masks(self, outputs: Any) -> None:
        """
        Raises:
            ConfigError: outputs of a model without ``keras.Input`` have a mask, and metrics.
        """
        means = [one.name for one in self.measures if not self.is_summed(one)]
        for mask in map(get_keras_mask, keras.tree.flatten(outputs)):
            if mask is not None and means and not any(self.mask_axes):
                raise ConfigError(
                    f"the model of {self.owner!r} gives its outputs a mask, which is not known "
                    f"before a call, so {', '.join(means)} would be measured without "
                    "it; begin the model with keras.Input(shape), or leave these metrics out"
                )

    def inputs_of(self, batch: Batch) -> Any:
        check_rows(batch, self.owner)
        return _like(self._inputs_like, batch[: len(self.inputs)])

    def parts_of(self, batch: Batch) -> tuple[Any, Any, Any]:
        """Return inputs, targets and weights of the examples, as Keras takes them.

        Raises:
            ConfigError: the batch has too few arrays, or too many.
        """
        inputs, outputs = len(self.inputs), len(self.outputs)
        check_rows(batch, self.owner)
        targets, more = batch[inputs : inputs + outputs], batch[inputs + outputs :]
        needed = inputs + self._needs_targets
        if len(batch) < needed or len(more) > 1:
            raise ConfigError(
                f"a batch for {self.owner!r} has {len(batch)} arrays; expected {inputs} "
                f"inputs, {outputs} targets, and at most one of weights"
            )
        tree = self.outputs_like if len(targets) == outputs else None
        return self.inputs_of(batch), _like(tree, targets), more[0] if more else None


def whole(value: Any) -> Any:
    """Return the values of a variable, or all rows of a table."""
    return value.whole() if isinstance(value, TableReader) else value


def _computer(network: Network, owner: object) -> Any:
    """Return the object that computes steps on the backend of this process."""
    if keras.backend.backend() == "torch":
        from zmqtrain.adapters.keras_torch import OnTorch

        return OnTorch(network, owner)
    from zmqtrain.adapters.keras_jax import OnJax

    return OnJax(network, owner)


def named(variables: Iterable[Any]) -> dict[str, Any]:
    """Return variables by path; a path that occurs again gets a number."""
    found: dict[str, Any] = {}
    for variable in variables:
        name, number = variable.path, 1
        while name in found:
            name, number = f"{variable.path}_{number}", number + 1
        found[name] = variable
    return found


def _ids_of_frozen(model: Any) -> set[int]:
    """Return the ids of variables that never change: weights and statistics of frozen layers.

    The seed of such a layer still changes. So may a variable that a user's layer has made with
    ``trainable=False``.
    """
    found: set[int] = set()
    for layer in model._flatten_layers():
        fixed = [v for v in layer._trainable_variables if not v.trainable]
        if not layer.trainable and isinstance(layer, keras.layers.BatchNormalization):
            fixed += layer.non_trainable_weights
        found |= {id(variable) for variable in fixed}
    return found


def values_of(variables: Mapping[str, Any]) -> Weights:
    """Return copies, in dtypes of NumPy."""
    return {name: _plain(array_of(variable)) for name, variable in variables.items()}


def _plain(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array in a dtype that every NumPy has."""
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


def arrays_of(outputs: Any) -> Any:
    """Return outputs as an array, or a tuple of several; masked arrays where they have a mask."""
    arrays = [_output_array(one) for one in keras.tree.flatten(outputs)]
    return tuple(arrays) if len(arrays) > 1 else arrays[0]


def _output_array(output: Any) -> NDArray[Any]:
    array, mask = _plain(keras.ops.convert_to_numpy(output)), get_keras_mask(output)
    if mask is None:
        return array
    counts = np.asarray(keras.ops.convert_to_numpy(mask), bool)
    if counts.shape != array.shape[: counts.ndim]:
        raise ConfigError(
            f"an output of the model has the shape {array.shape}, and its mask {counts.shape}; "
            "expected a mask of its first axes"
        )
    hidden = np.broadcast_to(
        ~counts.reshape(*counts.shape, *[1] * (array.ndim - counts.ndim)), array.shape
    )
    return np.ma.masked_array(array, hidden)


def _names(tree: Any, names: Sequence[str]) -> list[str]:
    """Return the names of inputs or outputs in the order of a batch; [""] if they are not known."""
    return sorted(tree) if isinstance(tree, dict) else list(names) or [""]


def _like(tree: Any, arrays: Sequence[Any]) -> Any:
    """Return arrays as Keras takes them: nested like ``tree``; without one, as a list."""
    if keras.tree.is_nested(tree):
        return keras.tree.pack_sequence_as(tree, list(arrays))
    return (list(arrays) if len(arrays) > 1 else arrays[0]) if arrays else None


def load_weights(
    model: Any, weights: str | Path | Mapping[str, NDArray[Any]], *, average: bool = False
) -> None:
    """Load trained weights into a Keras model: of a logdir, or the result of `zmqtrain.load`.

    The numbers that Keras gives to layers without a name may differ. ``average``: the moving
    averages of a logdir. Else a compiled optimizer that computes what the job's did gets the state
    in the logdir, and goes on with it; without that, a warning has the reason.

    Raises:
        ConfigError: names or shapes are not those of the model.
        CheckpointError: the logdir has no checkpoint.
    """
    at = None
    if not isinstance(weights, Mapping):
        at = checkpoint_at(Path(weights))
        weights = load(weights, step=at[1].global_step, average=average)
    values = {name: whole(value) for name, value in weights.items()}
    own, names = named(model.variables), _renumbered(values)
    own = dict(zip(_renumbered(own), own.values(), strict=True))
    if text := difference(dict(zip(names, values.values(), strict=True)), own):
        raise ConfigError(f"the weights do not fit the model: {text}")
    variables = {name: own[key] for name, key in zip(values, names, strict=True)}
    for name, variable in variables.items():
        variable.assign(values[name])
    if at is not None and getattr(model, "optimizer", None) is not None and not average:
        try:
            give_state(model, variables, at[0])
        except (CheckpointError, ConfigError, TypeError) as error:
            log.warning("the optimizer of %s begins anew: %s", model.name, error)


def _renumbered(names: Iterable[str]) -> list[str]:
    """Return names in which the numbers at the ends of parts count from 0, in order.

    Keras numbers layers through a whole process: "dense_4" may be the second of its model.
    """
    rows = [[_numbered(part) for part in name.split("/")] for name in names]
    numbers: dict[str, list[int]] = defaultdict(list)
    for base, number in sorted({part for row in rows for part in row}):
        numbers[base].append(number)
    return ["/".join(f"{base}_{numbers[base].index(n)}" for base, n in row) for row in rows]


def _numbered(part: str) -> tuple[str, int]:
    base, mark, number = part.rpartition("_")
    return (base, int(number)) if mark and number.isdecimal() else (part, 0)
