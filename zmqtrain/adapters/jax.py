"""JAX: a pytree of parameters and pure functions as a model, trained as they are.

Variables have the names of the pytree's paths, such as "layers.0.weight". Parameters enter a
computation without a copy where they lie on JAX's device, and gradients leave it by one copy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zmqtrain.adapters.common import check_takes, name_of, numbers_of, weights_of
from zmqtrain.errors import ConfigError
from zmqtrain.hints import not_installed
from zmqtrain.models.base import BaseModel, Batch, Gradients, Parameters, is_measured, measured
from zmqtrain.models.tables import Table
from zmqtrain.store.weights import difference
from zmqtrain.user_code import is_of

try:
    import jax
    from jax import numpy as jnp
except ImportError as missing:
    raise not_installed("JAX", "jax") from missing

from zmqtrain.adapters.jax_memory import Differentiated, limit_threads, store, taken
from zmqtrain.adapters.jax_tables import TableOf, gathered, look_up, take_gradients
from zmqtrain.adapters.jax_trees import (
    Leaves,
    Tree,
    check_module,
    encoded,
    filled,
    fitting,
    is_float,
    leaves_of,
    may_be_classes,
)


class _Outline(NamedTuple):
    """A model's pytrees, as shapes and dtypes, and the names of their leaves."""

    parameters: Tree
    state: Tree
    trained: list[str]
    frozen: list[str]


class JaxModel(BaseModel):
    """A pytree of parameters, and how their loss is computed.

    The functions must be pure: ``jax.jit`` compiles them, once for all copies of the model.
    """

    def __init__(
        self,
        init: Callable[[Any], Tree],
        loss: Callable[..., Any],
        metrics: Callable[..., Mapping[str, Any]] | None = None,
        predict: Callable[..., Any] | None = None,
        *,
        has_state: bool = False,
        frozen: Sequence[str] = (),
        dtype: Any = None,
        labels_at: int | None = None,
        weight: Callable[[Any], Any] | None = None,
        tables: Mapping[str, TableOf] = MappingProxyType({}),
    ) -> None:
        """``init(key)`` returns the parameters: a pytree of float32 arrays.

        ``loss(parameters, batch, key)`` returns the mean loss over the batch, a tuple of arrays or
        another pytree, or a dict of ``loss`` and other mean measures, which ``fit`` shows.
        ``weight(batch)`` returns the weight of that mean among others, such as the number of tokens
        with a label; without it, it is that of examples. ``key`` is for dropout and
        the like; it depends on the job's seed and the batch's number. In an evaluation it is None:
        then nothing may be random.

        ``predict(parameters, inputs)`` returns outputs, one row an example, for the batch's first
        array. ``metrics(parameters, batch)`` returns further mean measures; without it, accuracy is
        measured if ``predict`` returns scores (n, classes) and all labels are numbers of these
        classes. ``labels_at``: the index of the labels in a batch of more than two arrays.

        ``has_state``: ``init`` returns (parameters, state), and ``loss`` (loss, new state); all
        functions but ``init`` take the state after the parameters. It is a pytree that a step
        renews, such as the statistics of batch normalisation.

        ``frozen``: patterns of names, such as "encoder.*"; matching parameters are not trained.
        ``dtype``: jax.numpy.bfloat16 to compute in it; parameters stay float32.

        ``tables``: variables of rows, of which a batch reads and trains some, such as
        {"user": TableOf(16, lambda batch: batch["user"])}: then parameters are a dict, whose "user"
        is an array of the rows of these ids, shape (n, 16).

        Raises:
            ConfigError: ``dtype`` is another one, or a function takes other arguments.
        """
        if dtype not in (None, jnp.bfloat16):
            raise ConfigError(
                f"dtype is {dtype!r}; expected jax.numpy.bfloat16 or None: float16 would need its "
                "loss scaled"
            )
        if not callable(init) or is_of(init, "flax", "equinox"):
            raise ConfigError(
                f"a {type(init).__name__} was given in place of init; expected a function of a "
                "key that returns parameters, and a loss that is a function of them"
            )
        trees = ["parameters", "state"] if has_state else ["parameters"]
        check_takes(loss, *trees, "batch", "key")
        check_takes(metrics, *trees, "batch")
        check_takes(predict, *trees, "inputs")
        check_takes(weight, "batch")
        self.init, self.loss, self.labels_at = init, loss, labels_at
        self._metrics, self._predict, self._weight = metrics, predict, weight
        self._has_state, self._patterns, self._dtype = has_state, tuple(frozen), dtype
        self._tables = dict(tables)
        self._first = jax.jit(self._initial)
        self._step = Differentiated(self, self._differentiate)
        self._evaluation = jax.jit(self._measure)
        self._outputs = jax.jit(self._apply)
        self._known_outline: _Outline | None = None
        self._seeds = _seeds(0, 0)
        self._out: Gradients = {}  # of the step of a loop of the user's own
        self._ids: dict[str, Tree] = {}  # of that step, by table

    def __repr__(self) -> str:
        options = [f", frozen={list(self._patterns)}"] if self._patterns else []
        options += [", dtype=bfloat16"] if self._dtype else []
        return f"JaxModel({name_of(self.init)}{''.join(options)})"

    def __deepcopy__(self, memo: object) -> JaxModel:
        other = copy.copy(self)  # they share compiled functions, and replace the rest
        other._first = jax.jit(other._initial)  # initial values may not depend on the seed alone
        return other

    def parameters(self, seed: int) -> Leaves:
        """Return the parameters that are trained, as ``init(jax.random.key(seed))`` has them.

        Raises:
            ConfigError: ``init`` returns no pytree of float32 arrays.
        """
        return self._values(seed, self._outline().trained)

    def frozen(self, seed: int) -> Leaves:
        """Return the parameters that are not trained."""
        return self._values(seed, self._outline().frozen)

    def state(self, seed: int) -> Leaves:
        """Return the variables that a step renews."""
        return self._values(seed, list(leaves_of(self._outline().state)))

    def tables(self, seed: int) -> dict[str, Table]:
        return {name: table.table() for name, table in self._tables.items()}

    def empty(self, method: str) -> Leaves:
        """Return zeros instead of parameters or state; nothing is compiled for them."""
        outline = self._outline()
        shapes = {n: v for n, v in leaves_of(outline.parameters).items() if n in outline.trained}
        if method == "state":
            shapes = jax.eval_shape(self._plain, outline.state)
        return {name: np.zeros(shape.shape, shape.dtype) for name, shape in shapes.items()}

    def seed_batch(self, seed: int, batch: int) -> None:
        self._seeds = _seeds(seed, batch)

    def loss_and_gradients(self, parameters: Parameters, batch: Batch, out: Gradients) -> float:
        found = look_up(self._tables, parameters, batch)
        names = [*self._outline().trained, *found.rows]
        given = found.values(parameters), found.batch
        loss, measures, results = self._step(names, *given, self._seeds)
        take_gradients(found.unique, results, out)
        store(results, out)
        if is_measured(out):
            measured(out, None, numbers_of(measures, self))
        return float(loss)

    def begin(self, parameters: Parameters, batch: Batch, out: Gradients) -> tuple[Any, ...]:
        """Return the arguments of the loss: parameters, state if there is any, batch and key."""
        found = look_up(self._tables, parameters, batch)
        self._out, self._ids = out, found.ids
        values, batch = jax.tree.map(jnp.asarray, taken((found.values(parameters), found.batch)))
        return *self._trees(values), batch, _key(self._seeds)

    def weight(self, batch: Batch) -> float | None:
        return None if self._weight is None else self._weight(taken(batch))

    def finish(self, loss: Any, gradients: Tree = None, state: Tree = ()) -> float:
        """End a step by its gradients and, if the model has state, the new one.

        Raises:
            ConfigError: they are not pytrees like those of ``init``.
        """
        self._check_loss(loss)
        outline = self._outline()
        if self._ids and isinstance(gradients, dict):
            gradients = dict(gradients)
            of_rows = {name: gradients.pop(name, None) for name in self._ids}
            for name, ids in self._ids.items():
                jax.tree.map(self._out[name].add, ids, of_rows[name])
        found = self._like(outline.parameters, gradients, "gradients")
        store({name: found[name] for name in outline.trained} | self._plain(state), self._out)
        return float(loss)

    def metrics(self, parameters: Parameters, batch: Batch) -> dict[str, float]:
        found = look_up(self._tables, parameters, batch)
        measures, are_classes = self._evaluation(
            taken(found.values(parameters)), taken(found.batch)
        )
        if not are_classes:
            del measures["accuracy"]
        return numbers_of({"loss": measures["loss"]} | measures, self)  # jit has sorted them

    def predict(self, parameters: Parameters, batch: Batch) -> Any:
        """Return the outputs for a tuple's first array, or for the whole batch, one row an example;
        the leaves of a pytree as a tuple."""
        if self._predict is None:
            return super().predict(parameters, batch)
        found = look_up(self._tables, parameters, batch)
        inputs = found.batch[:1] if isinstance(batch, tuple) else (found.batch,)
        outputs = self._outputs(taken(found.values(parameters)), taken(inputs))
        arrays = tuple(map(np.asarray, jax.tree.leaves(outputs)))
        return arrays[0] if isinstance(outputs, jax.Array) else arrays

    # These methods are compiled.

    def _initial(self, seeds: Any) -> tuple[Tree, Tree]:
        """Return (parameters, state)."""
        found = self.init(jax.random.key(seeds[0]))
        parameters, state = self._pair(found, "init") if self._has_state else (found, ())
        check_module(parameters, self)
        for name, leaf in [*leaves_of(parameters).items(), *leaves_of(state).items()]:
            if not isinstance(leaf, jax.Array | np.ndarray | np.generic | float | int):
                raise ConfigError(
                    f"{name!r} of {self!r} is a {type(leaf).__name__}; expected arrays only: keep "
                    "the rest out of the pytree, as equinox.partition does"
                )
        return parameters, state

    def _differentiate(self, trained: Leaves, others: Leaves, batch: Batch, seeds: Any) -> Any:
        """Return the loss, other measures, and gradients and new state by name."""
        key = _key(seeds)
        return self._step.of(lambda trained: self._loss_of(trained | others, batch, key), trained)

    def _loss_of(
        self, values: Leaves, batch: Batch, key: Any
    ) -> tuple[Any, tuple[dict[str, Any], Leaves]]:
        """Return the loss, and a pair: other measures, and the new state by name."""
        found = self.loss(*self._trees(values), self._cast(batch), key)
        loss, state = self._pair(found, "loss") if self._has_state else (found, ())
        measures = dict(loss) if isinstance(loss, Mapping) else {"loss": loss}
        loss = measures.pop("loss", None)
        self._check_loss(loss)
        return loss, (measures, self._plain(state))

    def _measure(self, values: Leaves, batch: Batch) -> tuple[dict[str, Any], Any]:
        """Return measures, and whether the labels of their accuracy are numbers of classes."""
        are_classes: Any = True
        trees, inputs = self._trees(values), self._cast(batch)
        measures = dict(self._metrics(*trees, inputs)) if self._metrics is not None else {}
        if "loss" not in measures:
            loss, (others, _) = self._loss_of(values, batch, None)
            measures = {"loss": loss, **others, **measures}
        if self._metrics is None and self._predict is not None and isinstance(batch, tuple):
            outputs = self._predict(*trees, inputs[0])
            at = 1 if self.labels_at is None and len(batch) == 2 else self.labels_at
            if at and at < len(batch) and may_be_classes(outputs, labels := batch[at]):
                measures["accuracy"] = (outputs.argmax(1) == labels).mean()
                are_classes = ((labels >= 0) & (labels < outputs.shape[1])).all()
        return measures, are_classes

    def _apply(self, values: Leaves, inputs: Batch) -> Any:
        assert self._predict is not None
        outputs = self._predict(*self._trees(values), *self._cast(inputs))
        return jax.tree.map(lambda x: x.astype(np.float32) if is_float(x) else x, outputs)

    def _values(self, seed: int, names: Sequence[str]) -> Leaves:
        """Return initial values."""
        if not names:
            return {}
        parameters, state = self._first(_seeds(seed, 0))
        values = leaves_of(parameters) | self._plain(state)
        return {name: np.array(values[name]) for name in names}

    # Pytrees.

    def _outline(self) -> _Outline:
        """Return the model's outline, without computing values.

        Raises:
            ConfigError: ``init`` returns no pytree of float32 arrays.
        """
        if self._known_outline is None:
            limit_threads()
            parameters, state = jax.eval_shape(self._initial, self._seeds)
            leaves = leaves_of(parameters)
            frozen = fitting(self._patterns, leaves, self)
            trained = [name for name in leaves if name not in frozen]
            for name in trained:
                if leaves[name].dtype != np.float32:
                    raise ConfigError(
                        f"parameter {name!r} of {self!r} is {leaves[name].dtype}; expected float32:"
                        " give dtype=jax.numpy.bfloat16 to compute in it, and make part of the "
                        "state what is not trained"
                    )
            self._known_outline = _Outline(parameters, state, trained, frozen)
        return self._known_outline

    def trained_tree(self, values: Leaves) -> Tree:
        """Return the parameters as ``init`` has them, with None for those without a value here."""
        structure = jax.tree.structure(self._outline().parameters)
        names = leaves_of(self._outline().parameters)
        return jax.tree.unflatten(structure, [values.get(name) for name in names])

    def _trees(self, values: Leaves) -> list[Tree]:
        """Return the first arguments of the functions: parameters, and state if there is any."""
        outline = self._outline()
        own = filled(outline.parameters, values)
        trees = [self._cast(gathered(self._tables, values, own))]
        return [*trees, filled(outline.state, values)] if self._has_state else trees

    def _cast(self, tree: Tree) -> Tree:
        """Return a pytree in the dtype of computations."""
        if self._dtype is None:
            return tree
        return jax.tree.map(lambda x: x.astype(self._dtype) if is_float(x) else x, tree)

    def _plain(self, state: Tree) -> Leaves:
        """Return the state by name, in dtypes of NumPy."""
        outline = self._outline().state
        found = self._like(outline, state, "new state")
        return {name: encoded(found[name], shape) for name, shape in leaves_of(outline).items()}

    def _like(self, outline: Tree, tree: Tree, what: str) -> Leaves:
        """Return the leaves of a pytree that has the names and shapes of the outline.

        Raises:
            ConfigError: it has others.
        """
        leaves = leaves_of(tree)
        if text := difference(leaves, leaves_of(outline)):
            raise ConfigError(
                f"the {what} of {self!r}: {text}; expected a pytree like that of init"
            )
        return leaves

    def _pair(self, found: Any, function: str) -> tuple[Any, Tree]:
        if not isinstance(found, tuple) or len(found) != 2:
            raise ConfigError(
                f"{function} of {self!r} returned a {type(found).__name__}; expected a pair, whose "
                "second is the state: the model has has_state"
            )
        return found

    def _check_loss(self, loss: Any) -> None:
        is_number = isinstance(loss, jax.Array | np.generic | float) and is_float(loss)
        if not is_number or np.shape(loss) != ():
            shape = getattr(loss, "shape", None)
            found = f"{loss!r:.80}" if shape is None else f"of shape {shape}, {loss.dtype}"
            raise ConfigError(
                f"the loss of {self!r} is {found}; expected one floating-point number: return "
                "the mean over the batch"
            )


def load_pytree(
    tree: Tree, weights: str | Path | Mapping[str, Any], *, average: bool = False
) -> Tree:
    """Return ``tree`` with trained values: those of a logdir, or given arrays by name.

    ``tree``: what ``init`` returns, be it parameters or a tuple of parameters and state, or its
    shapes by jax.eval_shape. ``average``: the moving averages of a logdir.

    Raises:
        ConfigError: a leaf is missing, or has another shape.
        CheckpointError: the logdir has no checkpoint.
    """
    values = weights_of(weights, average=average)
    tree = jax.tree.map(lambda leaf: leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf), tree)
    if type(tree) is tuple and len(tree) == 2 and values.keys().isdisjoint(leaves_of(tree)):
        return load_pytree(tree[0], values), load_pytree(tree[1], values)
    plain = {n: jax.eval_shape(partial(encoded, like=v), v) for n, v in leaves_of(tree).items()}
    if text := difference({n: v for n, v in values.items() if n in plain}, plain):
        raise ConfigError(f"the weights do not fit the pytree: {text}; expected those of its model")
    return jax.tree.map(jnp.asarray, filled(tree, values))


def _seeds(seed: int, batch: int) -> NDArray[np.uint32]:
    return np.array([seed % 2**32, batch % 2**32], np.uint32)


def _key(seeds: Any) -> Any:
    return jax.random.fold_in(jax.random.key(seeds[0]), seeds[1])
