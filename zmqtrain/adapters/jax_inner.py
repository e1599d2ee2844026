"""Transformations of optax that train a worker's own parameters in local steps, as they are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from numpy.typing import NDArray

from zmqtrain.errors import ConfigError

_SCHEDULED = (
    *("ScaleByScheduleState", "WrappedScheduleState"),
    *("InjectHyperparamsState", "InjectStatefulHyperparamsState"),
)
"""States of optax whose ``count`` is what a schedule is called with."""


class JaxInner:
    """A transformation over the worker's memory, with the model's own pytree of parameters.

    Parameters that are not trained are None there. A step is compiled.
    """

    def __init__(
        self,
        transformation: Any,
        tree_of: Callable[[Mapping[str, Any]], Any],
        values: Mapping[str, Any],
        gradients: Mapping[str, Any],
    ) -> None:
        """``tree_of``: returns the pytree of arrays by name, whose leaves are in their order.

        Raises:
            ConfigError: it accumulates gradients.
        """
        self._tree_of, self._values, self._gradients = tree_of, values, gradients
        self._state = transformation.init(self._tree(values))
        if "MultiStepsState" in str(jax.tree.structure(self._state)):
            raise ConfigError(
                "optax.MultiSteps adds gradients up before a step, but each batch of local steps "
                "is one; expected a transformation without it; give a larger batch_size"
            )
        self.kind = f"optax {jax.tree.structure(self._state)}"
        self._rate: float | None = None
        self._step = jax.jit(_step_of(transformation.update))

    def go_on(self, step: int, learning_rate: float | None) -> None:
        self._rate = learning_rate
        self._state = _at_step(self._state, step)

    def update(self, absent: Collection[str]) -> None:
        if self._rate is not None:
            self._state = _with_rate(self._state, self._rate)
        given = self._tree(self._gradients), self._state, self._tree(self._values)
        parameters, self._state = self._step(*given)
        for own, new in zip(self._values.values(), jax.tree.leaves(parameters), strict=True):
            np.copyto(own, np.asarray(new))

    def state(self) -> dict[str, NDArray[Any]]:
        return {str(n): np.array(_plain(x)) for n, x in enumerate(jax.tree.leaves(self._state))}

    def load(self, state: Mapping[str, NDArray[Any]]) -> None:
        leaves, structure = jax.tree.flatten(self._state)
        given = [_like(leaf, state[str(n)]) for n, leaf in enumerate(leaves)]
        self._state = jax.tree.unflatten(structure, given)

    def _tree(self, arrays: Mapping[str, Any]) -> Any:
        """Return copies, since the memory changes while a step may still be computed."""
        return self._tree_of({name: jnp.array(value) for name, value in arrays.items()})


def _step_of(update: Callable[..., Any]) -> Callable[..., Any]:
    def step(gradients: Any, state: Any, parameters: Any) -> tuple[Any, Any]:
        updates, state = update(gradients, state, parameters)
        return jax.tree.map(_added, parameters, updates), state

    return step


def _added(parameter: Any, update: Any) -> Any:
    return jnp.asarray(parameter + update).astype(parameter.dtype)  # as optax.apply_updates


def _map(state: Any, names: Collection[str], change: Callable[[Any], Any]) -> Any:
    """Return a state with changes to those of its parts that have one of these class names."""

    def is_one(part: Any) -> bool:
        return type(part).__name__ in names

    def changed(part: Any) -> Any:
        if not is_one(part):
            return part
        fields = {name: _map(getattr(part, name), names, change) for name in part._fields}
        return change(part._replace(**fields))

    return jax.tree.map(changed, state, is_leaf=is_one)


def _at_step(state: Any, step: int) -> Any:
    """Return a state whose schedules go on at this step."""
    return _map(
        state, _SCHEDULED, lambda part: part._replace(count=jnp.full_like(part.count, step))
    )


def _with_rate(state: Any, rate: float) -> Any:
    """
    Raises:
        ConfigError: the transformation does not keep its learning rate in its state.
    """
    found: list[Any] = []

    def changed(part: Any) -> Any:
        if "learning_rate" not in part.hyperparams:
            return part
        found.append(part)
        before = part.hyperparams["learning_rate"]
        given = part.hyperparams | {"learning_rate": jnp.full_like(before, rate)}
        return part._replace(hyperparams=given)

    state = _map(state, {one for one in _SCHEDULED if one.startswith("Inject")}, changed)
    if not found:
        raise ConfigError(
            f"a callback sets the learning rate to {rate}, and the inner transformation of optax "
            "has none that can be set; expected one of optax.inject_hyperparams, such as "
            "inject_hyperparams(optax.adam)(learning_rate=0.001); or leave the callback out"
        )
    return state


def _is_key(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _plain(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _like(leaf: Any, value: Any) -> Any:
    """
    Raises:
        ValueError: the value has another shape.
    """
    if np.shape(_plain(leaf)) != value.shape:
        raise ValueError(f"{value.shape} in place of {np.shape(_plain(leaf))}")
    return jax.random.wrap_key_data(value) if _is_key(leaf) else jnp.array(value, leaf.dtype)
