"""Arrays of JAX and the worker's memory, for the adapters of JAX and of Keras on it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np
from jax import numpy as jnp

from zmqtrain.adapters.common import constant_loss
from zmqtrain.compute.threads import thread_limit
from zmqtrain.data.exact import exact, rounded
from zmqtrain.models.backend import array_module
from zmqtrain.models.base import Gradients, written

log = logging.getLogger(__name__)

# XLA reads it when it starts. By default the first process takes three quarters of a GPU's memory,
# and the other workers and ps of that GPU find none.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

IN_JAX = "an array for JAX, which computes in 32 bits,"

Values: TypeAlias = dict[str, Any]
"""Arrays by name."""


def limit_threads() -> None:
    """Limit XLA to the threads of this task; it reads the limit when it starts."""
    if (threads := thread_limit()) is not None:
        os.environ.setdefault("PJRT_NPROC", str(threads))


def taken(arrays: Any) -> Any:
    """Return arrays that jit accepts: those of NumPy, and those of CuPy as JAX's.

    Raises:
        DataError: JAX, which computes in 32 bits by default, would change a number.
    """
    return jax.tree.map(_taken, arrays)


def _taken(array: Any) -> Any:
    if isinstance(array, Mapping):  # that JAX takes for a leaf, such as a BatchEncoding
        return taken(dict(array))
    if hasattr(array, "__cuda_array_interface__"):
        return jnp.from_dlpack(array)
    if not isinstance(array, np.ndarray | np.generic):
        return _taken(np.asarray(array)) if hasattr(array, "__array__") else array
    if array.dtype.itemsize < 8 or array.dtype.kind not in "iuf" or jax.config.jax_enable_x64:
        return array
    if array.dtype.kind == "f":
        return rounded(np.asarray(array), IN_JAX)
    dtype = np.int32 if array.dtype.kind == "i" else np.uint32
    advice = 'number its values from 0 on, or call jax.config.update("jax_enable_x64", True)'
    return exact(np.asarray(array), dtype, IN_JAX, advice)


def store(values: Mapping[str, Any], out: Gradients) -> None:
    """Copy values of JAX into the buffers of their names."""
    for name, value in values.items():
        xp = array_module(out[name])
        out[name][...] = np.asarray(value) if xp is np else xp.from_dlpack(value)
        written(out, name)


class Differentiated:
    """The gradient of a loss, compiled once for each shape of batches."""

    def __init__(self, owner: object, step: Callable[..., tuple[Any, Any, Values]]) -> None:
        """``owner``: the model, for texts. ``step(trained, others, *rest)`` is compiled; it calls
        :meth:`of`."""
        self._owner, self._step = owner, jax.jit(step)
        self._used: set[str] = set()  # trained variables that have a gradient
        self._shapes: set[Any] = set()  # of batches that are known

    def of(
        self, loss_of: Callable[[Values], tuple[Any, tuple[Any, Values]]], trained: Values
    ) -> tuple[Any, Any, Values]:
        """Return the loss, other results, and gradients and new state by name; while compiled.

        ``loss_of(trained)`` returns the loss, and a pair: other results and the new state.
        """

        def noted(trained: Values) -> tuple[Any, tuple[Any, Values]]:
            return loss_of({n: _noting(self._used, n, v) for n, v in trained.items()})

        (loss, (beside, state)), gradients = jax.value_and_grad(noted, has_aux=True)(trained)
        return loss, beside, gradients | state

    def __call__(
        self, names: Collection[str], parameters: Mapping[str, Any], batch: Any, *rest: Any
    ) -> tuple[Any, Any, Values]:
        """Return the loss, other results, and gradients and new state by name.

        ``names``: names of the trained variables.

        Raises:
            ConfigError: no trained variable has a gradient.
        """
        others = taken(dict(parameters))
        trained = {name: others.pop(name) for name in names}
        batch = taken(batch)
        shapes = tuple((np.shape(a), str(np.result_type(a))) for a in jax.tree.leaves(batch))
        is_new = shapes not in self._shapes
        if is_new:
            self._shapes.add(shapes)
            log.info("compiling a step of %r for a batch of %s", self._owner, shapes)
        loss, beside, results = self._step(trained, others, batch, *rest)
        if is_new and (unused := sorted(trained.keys() - self._used)):
            if len(unused) == len(trained):
                raise constant_loss(self._owner)
            text = "parameters %s of %r have no gradient: it counts as zero"
            log.warning(text, ", ".join(unused), self._owner)
        return loss, beside, results


def _noting(noted: set[str], name: str, value: Any) -> Any:
    """Return the value; the name is noted when its gradient is derived."""

    def backward(_: None, gradient: Any) -> tuple[Any]:
        noted.add(name)
        return (gradient,)

    identity = jax.custom_vjp(lambda x: x)
    identity.defvjp(lambda x: (x, None), backward)
    return identity(value)
