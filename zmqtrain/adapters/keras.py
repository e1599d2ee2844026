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
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

from zmqtrain.adapters.common import check_build, name_of
from zmqtrain.compute.generators import generators_kept
from zmqtrain.errors import CheckpointError, ConfigError, DataError, FencedError, RefusedError
from zmqtrain.hints import not_installed
from zmqtrain.models.base import BaseModel, Batch, Gradients, Parameters, is_measured, measured
from zmqtrain.models.tables import Table
from zmqtrain.user_code import user_code

try:
    import keras
    from keras.src.backend.common import global_state
except ModuleNotFoundError as missing:
    if missing.name == "tensorflow":
        raise ConfigError(
            "Keras is set to its TensorFlow backend, which zmqtrain does not train; set "
            "KERAS_BACKEND to torch or jax, before Keras is imported"
        ) from missing
    raise not_installed("Keras", "keras") from missing

from zmqtrain.adapters.keras_metrics import SummedMetric
from zmqtrain.adapters.keras_network import Network, Weights, arrays_of, named, values_of
from zmqtrain.adapters.keras_network import load_weights as load_weights
from zmqtrain.adapters.keras_optimizers import check_state, give_state

BACKEND: str = keras.backend.backend()
if BACKEND not in ("torch", "jax"):
    raise ConfigError(
        f"Keras has its backend {BACKEND}; expected torch or jax: set KERAS_BACKEND to one of "
        "them, before Keras is imported"
    )

log = logging.getLogger(__name__)

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
        self._network: Network | None = None  # of steps
        self._newest: Network | None = None  # for initial values, once the other one has none
        self._patterns: tuple[Any, ...] = ()  # of the names of tables
        self._told: set[str] = set()  # reasons why its files hold weights alone

    def __repr__(self) -> str:
        return f"KerasModel({name_of(self.build)}, backend={BACKEND})"

    def __deepcopy__(self, memo: object) -> KerasModel:
        other = copy.copy(self)
        if BACKEND == "torch":  # on jax they share compiled functions, and keep nothing
            other._network = other._newest = None
        return other

    @property
    def module(self) -> Any:
        """The Keras model; on torch its parameters are the worker's memory during a step."""
        return self._ready.model

    def new_variables(self) -> dict[str, Any]:
        """Return the trained variables of a new model, by name."""
        return self._built(0, self._patterns).trained

    @property
    def optimizer(self) -> Any:
        """The compiled optimizer, for a job without one; None: there is none."""
        return self._ready.optimizer

    @property
    def summed_metrics(self) -> list[SummedMetric]:
        """The compiled metrics that are not means over examples, such as AUC, weighted metrics, and
        those of outputs with a mask; :meth:`metrics` measures the others."""
        network = self._ready
        return [SummedMetric(one, network) for one in network.measures if network.is_summed(one)]

    @property
    def compiled_metrics(self) -> list[Any]:
        return list(self._ready.model.metrics)

    @property
    def directions(self) -> dict[str, bool]:
        """Whether a larger value is better, by the name of a compiled metric, if Keras knows it."""
        found = {one.name: one.direction for one in self._ready.measures}
        return {name: direction == "up" for name, direction in found.items() if direction}

    @property
    def labels_at(self) -> int:
        """The index of the labels in a batch: behind the inputs.

        Raises:
            ConfigError: the model has several outputs.
        """
        if len(self._ready.outputs) > 1:
            raise ConfigError(
                f"{self!r} has several outputs, and so several arrays of labels; class_weight and "
                "metrics of zmqtrain expect one: give sample_weight, or compile the model with "
                "metrics"
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
        return values_of(network.trained)

    def make_tables(self, patterns: Sequence[Any]) -> None:
        if tuple(patterns) != self._patterns:
            self._patterns, self._network, self._newest = tuple(patterns), None, None

    def tables(self, seed: int) -> dict[str, Table]:
        """Return the embeddings that the job makes tables.

        Raises:
            ConfigError: one cannot be a table.
        """
        return {name: layer.table for name, layer in self._initial(seed).tables.items()}

    def state(self, seed: int) -> Weights:
        return values_of(self._initial(seed).state)

    def frozen(self, seed: int) -> Weights:
        return values_of(self._initial(seed).frozen)

    def seed_batch(self, seed: int, batch: int) -> None:
        self._ready.computer.seed(seed, batch)

    def loss_and_gradients(self, parameters: Parameters, batch: Batch, out: Gradients) -> float:
        network, parts = self._ready, self._ready.parts_of(batch)
        loss, outputs, measures = network.computer.step(
            parameters, parts, out, is_measured=is_measured(out)
        )
        if is_measured(out):
            network.check_masks(outputs)
            measured(out, len(batch[0]), self._means(measures), lambda: (arrays_of(outputs), batch))
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
        """Return the model's outputs for the batch's first arrays, one row an example; a tuple of
        several, in the order of the targets. Outputs with a mask are masked arrays."""
        network = self._ready
        return arrays_of(network.computer.predict(parameters, network.inputs_of(batch)))

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
        """Return all variables, with the values in a Keras file, such as ``x.weights.h5``.

        Raises:
            ConfigError: it cannot be read, or is of another model.
        """
        network = self._built(0, ())
        try:
            network.model.load_weights(path)
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(
                f"weights cannot be read from {str(path)!r}: {error}; expected those of this "
                "model, which keras.Model.save_weights has written"
            ) from error
        return values_of(network.variables)

    def save(self, path: str | Path, weights: Mapping[str, Any], at: Any = None) -> None:
        """Write a model with these weights as Keras does, whole or into ``.weights.h5``."""
        model = self.with_weights(weights)
        is_whole = ".weights." not in Path(path).name
        if is_whole and model.optimizer is not None:
            try:
                if at is None:
                    raise CheckpointError("it can be read between epochs alone, not on_steps")
                check = partial(check_state, model.optimizer)
                at(check, partial(give_state, model, named(model.variables)))
            except FencedError:  # a ps was restarted: the hook will be called again
                raise
            except (CheckpointError, ConfigError, RefusedError, OSError, TypeError) as error:
                if str(error) not in self._told:
                    log.warning("%s has no state of the optimizer, such as Adam's moments: %s",
                                path, error)  # fmt: skip
                self._told.add(str(error))
        write = model.save if is_whole else model.save_weights
        write(path, overwrite=True)

    def with_weights(self, weights: Mapping[str, Any]) -> Any:
        """Return a new Keras model that has these weights, for its user alone."""
        network = self._built(0, ())
        network.assign(weights)
        network.model.optimizer = network.optimizer
        return network.model

    @property
    def _ready(self) -> Network:
        return self._network if self._network is not None else self._initial(0)

    def _initial(self, seed: int) -> Network:
        """Return a model with the initial values of a seed; the first one is kept for steps."""
        for known in (self._network, self._newest):
            if known is not None and known.initial_seed == seed:
                return known
        network = self._built(seed, self._patterns)
        self._network, self._newest = self._network or network, network
        return network

    def _built(self, seed: int, patterns: Sequence[Any]) -> Network:
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
            return Network(model, seed, self, patterns)

    def _compile(self, model: Any) -> None:
        """Compile the model if it is not compiled, and check that it can be trained."""
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


@contextmanager
def _as_in_a_new_process(seed: int, policy: Any) -> Iterator[None]:
    """Seed all generators, number layers from 0, and take this dtype policy; undo it afterwards."""
    names = ["object_name_uids", "global_random_seed", "global_seed_generator", "dtype_policy"]
    kept = {name: global_state.get_global_attribute(name) for name in names}
    with generators_kept():
        try:
            global_state.set_global_attribute("object_name_uids", defaultdict(int))
            keras.config.set_dtype_policy(policy)
            keras.utils.set_random_seed(seed)
            yield
        finally:
            for name, value in kept.items():
                global_state.set_global_attribute(name, value)
