"""Steps of a Keras model on the jax backend: pure functions of its variables, compiled once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import keras
import numpy as np
from keras.src.backend import get_keras_mask, set_keras_mask

from zmqtrain.adapters.jax_memory import Differentiated, Values, store, taken
from zmqtrain.adapters.jax_tables import take_gradients
from zmqtrain.adapters.keras_jax_tables import JaxTables
from zmqtrain.models.base import Gradients, Parameters
from zmqtrain.models.checks import check_classes, written_in_a_step


class _ClassTarget(NamedTuple):
    """A target of class numbers, and the number of classes."""

    target: int
    classes: int
    ignored: int | None


class OnJax:
    """A network as functions of its variables by name; threads may share it."""

    def __init__(self, network: Any, owner: object) -> None:
        self._network, self._model = network, network.model
        self._tables = JaxTables(network.tables, network.model, owner)
        self._steps = {  # by whether they measure
            kind: Differentiated(owner, partial(self._differentiate, kind))
            for kind in (False, True)
        }
        self._evaluation = jax.jit(self._evaluate)
        self._outputs = jax.jit(self._predict)
        self._compiled: set[Any] = set()  # functions and shapes
        self._class_targets: list[_ClassTarget] = []  # once a loss is compiled
        self._lock = threading.Lock()  # while Keras's model is traced

    def seed(self, seed: int, batch: int) -> None:
        """Do nothing: all random numbers come from seeds that are state."""

    def step(
        self, values: Parameters, parts: tuple[Any, ...], out: Gradients, *, is_measured: bool
    ) -> tuple[Any, Any, dict[str, Any]]:
        """Write gradients and new state into ``out``; return loss, outputs, and measures.

        Raises:
            ConfigError: nothing that is trained has a gradient, or a label is of no class.
        """
        step, found = self._steps[is_measured], self._tables.look_up(values, parts[0])
        names = [*self._network.trained, *found.unique]
        given = names, found.values, parts
        loss, beside, results = self._call(step, parts, *given, sizes=found.sizes)
        self._network.initial_seed = None  # other tasks build their own, which may differ
        self._check_labels(parts[1])
        take_gradients(found.unique, results, out)
        store(results, out)
        if not is_measured:
            return loss, None, {}
        outputs, masks, measures = beside
        return loss, _with_masks(outputs, masks), measures

    def evaluate(
        self, values: Parameters, parts: tuple[Any, ...]
    ) -> tuple[Any, Any, dict[str, Any]]:
        """Return loss, outputs, and measures.

        Raises:
            ConfigError: a label is of no class.
        """
        looked_up = self._tables.look_up(values, parts[0])
        given = taken(dict(looked_up.values)), taken(parts)
        found = self._call(self._evaluation, parts, *given, sizes=looked_up.sizes)
        loss, (outputs, masks), measures = found
        self._check_labels(parts[1])
        return loss, _with_masks(outputs, masks), measures

    def predict(self, values: Parameters, inputs: Any) -> Any:
        looked_up = self._tables.look_up(values, inputs)
        given = taken(dict(looked_up.values)), taken(inputs)
        return _with_masks(*self._call(self._outputs, inputs, *given, sizes=looked_up.sizes))

    def _check_labels(self, targets: Any) -> None:
        """Check labels, which Keras's losses on jax do not: there a wrong label counts as none."""
        every = keras.tree.flatten(targets)
        if len(every) != len(self._network.outputs):
            return  # outputs without a loss have no target
        for number, classes, ignored in self._class_targets:
            labels = every[number]
            labels = labels if ignored is None else labels[labels != ignored]
            if labels.size:
                check_classes(labels, classes)

    def _call(
        self,
        function: Callable[..., Any],
        batch: Any,
        *arguments: Any,
        sizes: tuple[int, ...],
    ) -> Any:
        """Call a function; ``sizes``: the numbers of rows of tables."""
        shapes = tuple((np.shape(a), str(a.dtype)) for a in jax.tree.leaves(batch))
        kind = (id(function), shapes, sizes)
        if kind in self._compiled:
            return function(*arguments)
        with self._lock, self._tables.tracing():
            if function is not self._outputs:
                # Metrics and losses of compile() may make variables, which no trace may do.
                self._model._symbolic_build(data_batch=batch)
            result = function(*arguments)
            self._compiled.add(kind)
        return result

    # These methods are compiled.

    def _differentiate(
        self, is_measured: bool, trained: Values, others: Values, parts: Any
    ) -> tuple[Any, Any, Values]:
        """Return the loss, (outputs, masks, measures) or (), and gradients and new state."""

        def loss_of(trained: Values) -> tuple[Any, tuple[Any, Values]]:
            loss, outputs, metrics, state = self._loss_of(trained | others, parts, training=True)
            if not is_measured:
                return loss, ((), state)
            measures = self._measures(outputs, parts, metrics)
            return loss, ((outputs, _masks_of(outputs), measures), state)

        return self._steps[is_measured].of(loss_of, trained)

    def _measures(self, outputs: Any, parts: Any, metrics: list[Any]) -> dict[str, Any]:
        """Return the compiled metrics of one batch; ``metrics``: values of their variables, which
        hold the loss of each output."""
        x, y, weights = parts
        begin = list(zip(self._model.metrics_variables, metrics, strict=True))
        with keras.StatelessScope(state_mapping=begin):
            return dict(self._model.compute_metrics(x, y, outputs, weights))

    def _evaluate(self, values: Values, parts: Any) -> tuple[Any, Any, Any]:
        loss, outputs, metrics, _ = self._loss_of(values, parts, training=False)
        measures = self._measures(outputs, parts, metrics)
        return loss, (outputs, _masks_of(outputs)), measures

    def _predict(self, values: Values, inputs: Any) -> Any:
        options = {"training": False} if self._model._call_has_training_arg else {}
        outputs = self._model.stateless_call(*self._lists(values), inputs, **options)[0]
        return outputs, _masks_of(outputs)

    def _loss_of(self, values: Values, parts: Any, *, training: bool) -> tuple[Any, ...]:
        """Return loss, outputs, values of the metrics' variables, and the new state by name."""
        x, y, weights = parts
        # Other threads use the variables themselves.
        metrics = [jax.numpy.zeros_like(v.value) for v in self._model.metrics_variables]
        given = self._lists(values)
        loss, (_, outputs, others, metrics) = self._model.compute_loss_and_updates(
            *given, metrics, x, y, weights, training=training
        )
        if training:
            self._check_frozen(given[1], others)
        self._class_targets = list(self._classes_of(outputs))
        new = dict(zip(self._ids(self._model.non_trainable_variables), others, strict=True))
        state = self._network.state
        values = {name: new[id(variable)] for name, variable in state.items()}
        return loss, outputs, metrics, values

    def _classes_of(self, outputs: Any) -> Iterator[_ClassTarget]:
        """Yield the targets that Keras's own losses take for class numbers."""
        found = dict(keras.tree.flatten_with_path(outputs))
        for path, loss, *_ in getattr(self._model._compile_loss, "_flat_losses", None) or ():
            is_sparse = getattr(loss, "fn", None) is keras.losses.sparse_categorical_crossentropy
            if is_sparse and path in found:
                options = loss._fn_kwargs
                classes = found[path].shape[options.get("axis", -1)]
                yield _ClassTarget(list(found).index(path), classes, options.get("ignore_class"))

    def _check_frozen(self, before: list[Any], after: list[Any]) -> None:
        """
        Raises:
            ConfigError: a step assigns a frozen variable.
        """
        names = {id(variable): name for name, variable in self._network.frozen.items()}
        ids = self._ids(self._model.non_trainable_variables)
        for number, old, new in zip(ids, before, after, strict=True):
            if number in names and new is not old:
                raise written_in_a_step(self._network.owner, names[number], is_frozen=True)

    def _lists(self, values: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
        """Return values of trainable and of other variables, in the order of Keras; let layers
        look up rows of the tables among them."""
        self._tables.use(values)
        by_id = {
            id(variable): jax.numpy.asarray(values[name], variable.dtype)
            for name, variable in self._network.variables.items()
        }
        trained, others = self._model.trainable_variables, self._model.non_trainable_variables
        return [by_id[i] for i in self._ids(trained)], [by_id[i] for i in self._ids(others)]

    @staticmethod
    def _ids(variables: Any) -> list[int]:
        return [id(variable) for variable in variables]


def _masks_of(outputs: Any) -> list[Any]:
    """Return the masks of outputs, which do not leave a compiled function with them."""
    return [get_keras_mask(output) for output in keras.tree.flatten(outputs)]


def _with_masks(outputs: Any, masks: list[Any]) -> Any:
    for output, mask in zip(keras.tree.flatten(outputs), masks, strict=True):
        set_keras_mask(output, mask)
    return outputs
