"""Transformations of optax that train a worker's own parameters in local steps, as they are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import numpy as np
import optax
from jax import numpy as jnp
from numpy.typing import NDArray
from optax import tree_utils

from zmqtrain.errors import ConfigError

_SCHEDULED = "ScaleByScheduleState", "WrappedScheduleState", "InjectHyperparamsState"
"""States of optax whose ``count`` is the argument of a schedule."""


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
        self._state = jax.jit(transformation.init)(self._tree(values))
        shapes = jax.tree.map(np.shape, self._state)
        self.kind = f"optax {jax.tree.structure(self._state)} {jax.tree.leaves(shapes)}"
        if "MultiStepsState" in self.kind:
            raise ConfigError(
                "optax.MultiSteps adds gradients up before a step, but each batch of local steps "
                "is one; expected a transformation without it; give a larger batch_size"
            )

        def step(gradients: Any, state: Any, parameters: Any) -> tuple[Any, Any]:
            updates, state = transformation.update(gradients, state, parameters)
            return optax.apply_updates(parameters, updates), state

        self._step = jax.jit(step)

    def go_on(self, step: int, learning_rate: float | None) -> None:
        self._state = _at_step(self._state, step)
        if learning_rate is None:
            return
        try:
            self._state = tree_utils.tree_set(self._state, learning_rate=jnp.float32(learning_rate))
        except KeyError:
            raise ConfigError(
                f"a callback sets the learning rate to {learning_rate}, and the inner "
                "transformation of optax has none that can be set; expected one of "
                "optax.inject_hyperparams, such as inject_hyperparams(optax.adam)(learning_rate="
                "0.001); or leave the callback out"
            ) from None

    def update(self, absent: Collection[str]) -> None:
        given = self._tree(self._gradients), self._state, self._tree(self._values)
        parameters, self._state = self._step(*given)
        for own, new in zip(self._values.values(), jax.tree.leaves(parameters), strict=True):
            np.copyto(own, np.asarray(new))

    def state(self) -> dict[str, NDArray[Any]]:
        return {str(n): np.array(leaf) for n, leaf in enumerate(jax.tree.leaves(self._state))}

    def load(self, state: Mapping[str, NDArray[Any]]) -> None:
        leaves, structure = jax.tree_util.tree_flatten_with_path(self._state)
        given = [
            leaf if "hyperparams" in map(_name_of, path) else jnp.array(state[str(n)], leaf.dtype)
            for n, (path, leaf) in enumerate(leaves)
        ]  # hyperparameters may have been edited
        self._state = jax.tree.unflatten(structure, given)

    def _tree(self, arrays: Mapping[str, Any]) -> Any:
        """Return copies, since the memory changes while a step may still be computed."""
        return self._tree_of({name: jnp.array(value) for name, value in arrays.items()})


def _name_of(key: Any) -> str:
    return str(getattr(key, "name", ""))


def _at_step(state: Any, step: int) -> Any:
    """Return a state whose schedules go on at this step."""
    if isinstance(state, tuple) and hasattr(state, "_fields"):
        fields = {name: _at_step(getattr(state, name), step) for name in state._fields}
        now = {"count": jnp.int32(step)} if type(state).__name__ in _SCHEDULED else {}
        return type(state)(**fields | now)
    if type(state) in (tuple, list):
        return type(state)(_at_step(each, step) for each in state)
    if type(state) is dict:
        return {name: _at_step(each, step) for name, each in state.items()}
    return state
