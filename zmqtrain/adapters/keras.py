"""Keras 3 on its torch or its jax backend: a ``keras.Model`` as a model, trained as it is.

Loss and measures are computed by the objects with which the model was compiled. Variables have the
``path`` that Keras gives them in a new process, such as "sequential/dense/kernel". Statistics of
batch normalisation, counters and seeds are state; weights of layers with ``trainable=False`` are
frozen. On torch, parameters and gradients are views of the worker's memory; on jax a step is
compiled once.
"""

from __future__ import annotations

import copy
import logging
import random
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from zmqtrain.adapters.common import check_build, name_of, weights_of
from zmqtrain.errors import CheckpointError, ConfigError, DataError, not_installed
from zmqtrain.models.base import BaseModel, Batch, Gradients, Parameters, is_measured, measured
from zmqtrain.optim import Rule
from zmqtrain.store.weights import difference
from zmqtrain.user_code import user_code

try:
    import keras
    from keras.src.backend import get_keras_mask
    from keras.src.backend.common import global_state
except ModuleNotFoundError as missing:
    if missing.name == "tensorflow":
        raise ConfigError(
            "Keras is set to its TensorFlow backend, which zmqtrain does not train; set "
            "KERAS_BACKEND to torch or jax, before Keras is imported"
        ) from missing
    raise not_installed("Keras", "keras") from missing

from zmqtrain.adapters.keras_metrics import (
    Measure,
    SummedMetric,
    array_of,
    is_mean,
    measures_of,
)
from zmqtrain.adapters.keras_optimizers import rule_of

BACKEND: str = keras.backend.backend()
if BACKEND not in ("torch", "jax"):
    raise ConfigError(
        f"Keras has its backend {BACKEND}; expected torch or jax: set KERAS_BACKEND to one of "
        "them, before Keras is imported"
    )

log = logging.getLogger(__name__)

Weights = dict[str, NDArray[Any]]

_BUILT: WeakSet[Any] = WeakSet()  # models that are in use


class KerasModel(BaseModel):
    """A Keras model, compiled or not.

    Each copy has its own variables. Dropout's seeds are state: on one worker they are those of
    Keras's own training. On torch, layers without a seed draw from torch's generator, which depends
    on the job's seed and the batch's number.
    """

    suffixes = (".h5", ".keras")

    def __init__(self, build: Callable[[], Any], loss: Any = None, metrics: Any = None) -> None:
        """``build()`` returns the model with all its variables; the job's seed decides their
        initial values.

        ``loss``, ``metrics``: of a model that is not compiled, as ``compile`` takes them. A batch
        has the model's inputs, then a target for each output, then weights of the examples, if any.
        Those of a dict are in the order of its sorted names.
        """
        check_build(build, keras.Model)
        self.build = build
        self._loss, self._metrics = loss, metrics
        self._policy = keras.config.dtype_policy()  # Keras has one for each thread
        self._network: Network | None = None
        self._has_told = False  # that its files hold weights alone

    def __repr__(self) -> str:
        return f"KerasModel({name_of(self.build)}, backend={BACKEND})"

    def __deepcopy__(self, memo: object) -> KerasModel:
        other = copy.copy(self)
        if BACKEND == "torch":  # on jax they share what is compiled, and keep nothing
            other._network = None
        return other

    @property
    def module(self) -> Any:
        """The Keras model; on torch its parameters are the worker's memory during a step."""
        return self._ready.model

    @property
    def optimizer(self) -> Rule | None:
        """The rule of :mod:`zmqtrain.optim` that the compiled optimizer computes, if there is one.

        Raises:
            ConfigError: there is no rule like it.
        """
        optimizer = self._ready.optimizer
        return None if optimizer is None else rule_of(optimizer)

    @property
    def summed_metrics(self) -> list[SummedMetric]:
        """The compiled metrics that are no means over examples, such as AUC, the weighted ones,
        and those of outputs with a mask; the others are among :meth:`metrics`."""
        network = self._ready
        return [SummedMetric(one, network) for one in network.measures if network.is_summed(one)]

    @property
    def compiled_metrics(self) -> list[Any]:
        return list(self._ready.model.metrics)

    @property
    def directions(self) -> dict[str, bool]:
        """Whether the compiled metrics should be large, by name, as far as Keras knows it."""
        found = {one.name: one.direction for one in self._ready.measures}
        return {name: direction == "up" for name, direction in found.items() if direction}

    @property
    def labels_at(self) -> int:
        """Where a batch has its labels: behind the inputs.

        Raises:
            ConfigError: the model has several outputs.
        """
        if len(self._ready.outputs) > 1:
            raise ConfigError(
                f"{self!r} has several outputs, and so several arrays of labels; expected one for "
                "class_weight and for metrics of zmqtrain: give sample_weight, or compile the "
                "model with metrics"
            )
        return len(self._ready.inputs)

    @property
    def loss_adds_up(self) -> bool:
        """Whether a loss is a sum over its batch instead of a mean."""
        losses = keras.tree.flatten(self._ready.model.loss)
        return any(getattr(loss, "reduction", "") == "sum" for loss in losses)

    def parameters(self, seed: int) -> Weights:
        """Return the variables that are trained.

        Raises:
            ConfigError: one is not float32, or ``build`` returns no model that can be trained.
        """
        network = self._initial(seed)
        for name, variable in network.trained.items():
            if variable.dtype != "float32":
                raise ConfigError(
                    f"variable {name!r} of {self!r} is {variable.dtype}; expected float32: to "
                    'compute in bfloat16, set the dtype policy "mixed_bfloat16"'
                )
        return _values(network.trained)

    def state(self, seed: int) -> Weights:
        return _values(self._initial(seed).state)

    def frozen(self, seed: int) -> Weights:
        return _values(self._initial(seed).frozen)

    def seed_batch(self, seed: int, batch: int) -> None:
        self._ready.computer.seed(seed, batch)

    def loss_and_gradients(self, parameters: Parameters, batch: Batch, out: Gradients) -> float:
        network, parts = self._ready, self._ready.parts_of(batch)
        loss, outputs, measures = network.computer.step(
            parameters, parts, out, is_measured=is_measured(out)
        )
        if is_measured(out):
            network.check_masks(outputs)
            measured(
                out, len(batch[0]), self._means(measures), lambda: (_arrays_of(outputs), batch)
            )
        return float(loss)

    def metrics(self, parameters: Parameters, batch: Batch) -> dict[str, float]:
        network = self._ready
        loss, outputs, measures = network.computer.evaluate(parameters, network.parts_of(batch))
        network.check_masks(outputs)
        return self._means(measures | {"loss": loss})

    def _means(self, measures: Mapping[str, Any]) -> dict[str, float]:
        """Return the measures that are means over examples."""
        summed = [metric.name for metric in self.summed_metrics]
        return {name: float(value) for name, value in measures.items() if name not in summed}

    def predict(self, parameters: Parameters, batch: Batch) -> Any:
        """Return the model's outputs for the batch's first arrays, one row an example; of several
        outputs a tuple, in the order of the targets. Those with a mask are masked arrays."""
        network = self._ready
        return _arrays_of(network.computer.predict(parameters, network.inputs_of(batch)))

    def arrays_of(self, examples: Mapping[str, Any]) -> list[Any]:
        """Return inputs or targets by name in the order of a batch.

        Raises:
            DataError: the names are neither those of the inputs nor those of the outputs.
        """
        network = self._ready
        for names in (network.inputs, network.outputs):
            if set(names) == set(examples):
                return [examples[name] for name in names]
        raise DataError(
            f"arrays have the names {', '.join(examples)}; expected those of the inputs of "
            f"{self!r} ({', '.join(network.inputs)}) or of its outputs "
            f"({', '.join(network.outputs)})"
        )

    def read_weights(self, path: str | Path) -> Weights:
        """Return all variables, with those that Keras finds in a file, such as ``.weights.h5``.

        Raises:
            ConfigError: it cannot be read, or is of another model.
        """
        network = self._built(0)
        try:
            network.model.load_weights(path)
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(
                f"weights cannot be read from {str(path)!r}: {error}; expected those of this "
                "model, which keras.Model.save_weights has written"
            ) from error
        return network.values()

    def save(self, path: str | Path, weights: Mapping[str, Any], *, overwrite: bool = True) -> None:
        """Write a model with these weights as Keras does: whole, or its weights (``.weights.h5``).

        Raises:
            CheckpointError: it exists, and ``overwrite`` is False.
        """
        if Path(path).exists() and not overwrite:
            raise CheckpointError(f"{path} exists already; delete it, or write to another path")
        model = self.with_weights(weights)
        is_whole = ".weights." not in Path(path).name
        if is_whole and model.optimizer is not None and not self._has_told:
            self._has_told = True
            log.warning("%s has no state of the optimizer, such as Adam's moments; only a logdir "
                        "keeps it", path)  # fmt: skip
        write = model.save if is_whole else model.save_weights
        write(path, overwrite=True)

    def with_weights(self, weights: Mapping[str, Any]) -> Any:
        """Return a new Keras model that has these weights, for its user alone."""
        network = self._built(0)
        network.assign(weights)
        network.model.optimizer = network.optimizer
        return network.model

    @property
    def _ready(self) -> Network:
        return self._network if self._network is not None else self._initial(0)

    def _initial(self, seed: int) -> Network:
        """Return a model with the initial values of a seed; the first one is kept for steps."""
        if self._network is not None and self._network.initial_seed == seed:
            return self._network
        network = self._built(seed)
        if self._network is None:
            self._network = network
        return network

    def _built(self, seed: int) -> Network:
        if BACKEND == "jax":
            from zmqtrain.adapters.jax_memory import limit_threads

            limit_threads()
        with _as_in_a_new_process(seed, self._policy):
            with user_code("build()", self):
                model = self.build()
            if not isinstance(model, keras.Model):
                raise ConfigError(
                    f"build of {self!r} returned {model!r:.80}; expected a keras.Model"
                )
            if model in _BUILT:
                raise ConfigError(
                    f"build of {self!r} returned a model for the second time; expected a new one "
                    "from each call: make the model within build"
                )
            _BUILT.add(model)
            self._compile(model)
            return Network(model, seed, self)

    def _compile(self, model: Any) -> None:
        """Compile a model that is not, and check that it can be trained."""
        if model.compiled and (self._loss is not None or self._metrics is not None):
            raise ConfigError(
                f"{self!r} has a compiled model, and loss or metrics beside it; expected them in "
                "one place: leave them out here"
            )
        if not model.compiled:
            if self._loss is None:
                raise ConfigError(
                    f"the model of {self!r} has no loss; call compile(loss=...) in build, or give "
                    "KerasModel(build, loss)"
                )
            model.compile(None, copy.deepcopy(self._loss), metrics=copy.deepcopy(self._metrics))
        if type(model).train_step is not keras.Model.train_step:
            raise ConfigError(
                f"the model of {self!r} has a train_step of its own, which would include the "
                "optimizer's step; override compute_loss instead"
            )
        for variable in model.trainable_variables:
            if variable.constraint is not None:
                raise ConfigError(
                    f"variable {variable.path!r} of {self!r} has a constraint, which zmqtrain's "
                    "updates do not keep; leave it out, or use a regularizer"
                )
        if any(layer.compute_dtype == "float16" for layer in model._flatten_layers()):
            raise ConfigError(
                f"the model of {self!r} computes in float16, which needs its loss scaled; set the "
                'dtype policy "mixed_bfloat16"'
            )


class Network:
    """A built model, and its variables by name."""

    def __init__(self, model: Any, seed: int, owner: KerasModel) -> None:
        """
        Raises:
            ConfigError: the model has no variables yet.
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
        self.variables = _named(model.variables)
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

    def values(self) -> Weights:
        return _values(self.variables)

    def assign(self, weights: Mapping[str, Any]) -> None:
        for name, variable in self.variables.items():
            variable.assign(weights[name])

    def is_summed(self, measure: Measure) -> bool:
        """Return whether a measure is no mean over all examples."""
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
                    f"the model of {self.owner!r} gives its outputs a mask, of which nothing is "
                    f"known before it is called, so {', '.join(means)} would be measured without "
                    "it; begin the model with keras.Input(shape), or leave these metrics out"
                )

    def inputs_of(self, batch: Batch) -> Any:
        return _like(self._inputs_like, batch[: len(self.inputs)])

    def parts_of(self, batch: Batch) -> tuple[Any, Any, Any]:
        """Return inputs, targets and weights of the examples, as Keras takes them.

        Raises:
            ConfigError: the batch has too few arrays, or too many.
        """
        inputs, outputs = len(self.inputs), len(self.outputs)
        targets, more = batch[inputs : inputs + outputs], batch[inputs + outputs :]
        needed = inputs + self._needs_targets
        if len(batch) < needed or len(more) > 1:
            raise ConfigError(
                f"a batch for {self.owner!r} has {len(batch)} arrays; expected {inputs} "
                f"inputs, {outputs} targets, and at most one of weights"
            )
        tree = self.outputs_like if len(targets) == outputs else None
        return self.inputs_of(batch), _like(tree, targets), more[0] if more else None


def _computer(network: Network, owner: KerasModel) -> Any:
    """Return what computes steps on the backend of this process."""
    if BACKEND == "torch":
        from zmqtrain.adapters.keras_torch import OnTorch

        return OnTorch(network, owner)
    from zmqtrain.adapters.keras_jax import OnJax

    return OnJax(network, owner)


def load_weights(
    model: Any, weights: str | Path | Mapping[str, NDArray[Any]], *, average: bool = False
) -> None:
    """Load what zmqtrain has trained into a Keras model: a logdir, or what `zmqtrain.load` returns.

    The numbers that Keras gives to layers without a name may be others. ``average``: the moving
    averages of a logdir.

    Raises:
        ConfigError: names or shapes are not those of the model.
        CheckpointError: the logdir has no checkpoint.
    """
    values = weights_of(weights, average=average)
    given = dict(zip(_renumbered(values), values.values(), strict=True))
    variables = _named(model.variables)
    own = dict(zip(_renumbered(variables), variables.values(), strict=True))
    if text := difference(given, own):
        raise ConfigError(f"the weights do not fit the model: {text}")
    for name, variable in own.items():
        variable.assign(given[name])


@contextmanager
def _as_in_a_new_process(seed: int, policy: Any) -> Iterator[None]:
    """Seed all generators, number layers from 0, and take this dtype policy; undo it afterwards."""
    names = ["object_name_uids", "global_random_seed", "global_seed_generator", "dtype_policy"]
    kept = {name: global_state.get_global_attribute(name) for name in names}
    states = random.getstate(), np.random.get_state()
    # On torch, keras.src.backend has imported it.
    with sys.modules["torch"].random.fork_rng() if BACKEND == "torch" else nullcontext():
        try:
            global_state.set_global_attribute("object_name_uids", defaultdict(int))
            keras.config.set_dtype_policy(policy)
            keras.utils.set_random_seed(seed)
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            for name, value in kept.items():
                global_state.set_global_attribute(name, value)


def _named(variables: Iterable[Any]) -> dict[str, Any]:
    """Return variables by path; one that another has already gets a number."""
    found: dict[str, Any] = {}
    for variable in variables:
        name, number = variable.path, 1
        while name in found:
            name, number = f"{variable.path}_{number}", number + 1
        found[name] = variable
    return found


def _ids_of_frozen(model: Any) -> set[int]:
    """Return which variables nobody changes: weights and statistics of layers that rest.

    A seed of such a layer still changes, and so may a variable that a layer of the user's own has
    made with ``trainable=False``.
    """
    found: set[int] = set()
    for layer in model._flatten_layers():
        fixed = [v for v in layer._trainable_variables if not v.trainable]
        if not layer.trainable and isinstance(layer, keras.layers.BatchNormalization):
            fixed += layer.non_trainable_weights
        found |= {id(variable) for variable in fixed}
    return found


def _renumbered(names: Iterable[str]) -> list[str]:
    """Return names with the numbers at the ends of their parts counted from 0, in order.

    Keras numbers layers through a whole process: "dense_4" may be the second of its model.
    """
    parts = [name.split("/") for name in names]
    numbers: dict[str, set[int]] = defaultdict(set)
    for part in {part for row in parts for part in row}:
        base, number = _numbered(part)
        numbers[base].add(number)
    ranks = {base: sorted(found) for base, found in numbers.items()}

    def renumbered(part: str) -> str:
        base, number = _numbered(part)
        return f"{base}_{ranks[base].index(number)}"

    return ["/".join(map(renumbered, row)) for row in parts]


def _numbered(part: str) -> tuple[str, int]:
    found = re.fullmatch(r"(.*?)_(\d+)", part)
    return (found[1], int(found[2])) if found else (part, 0)


def _values(variables: Mapping[str, Any]) -> Weights:
    """Return copies, in dtypes of NumPy."""
    return {name: _plain(array_of(variable)) for name, variable in variables.items()}


def _plain(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array in a dtype that every NumPy has."""
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


def _arrays_of(outputs: Any) -> Any:
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
