"""Arrays of JAX and the worker's memory, for the adapters of JAX and of Keras on it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from zmqtrain.compute.threads import thread_limit
from zmqtrain.models.backend import array_module
from zmqtrain.models.base import Gradients, written


def limit_threads() -> None:
    """Have XLA use the threads of this task: it reads their number when it starts."""
    if (threads := thread_limit()) is not None:
        os.environ.setdefault("PJRT_NPROC", str(threads))


def taken(arrays: Any) -> Any:
    """Return arrays of NumPy as they are, for jit takes them, and those of CuPy as JAX's."""
    host = np.ndarray | np.generic
    return jax.tree.map(lambda x: x if isinstance(x, host) else jnp.from_dlpack(x), arrays)


def store(values: Mapping[str, Any], out: Gradients) -> None:
    """Copy values of JAX into the buffers of their names."""
    for name, value in values.items():
        xp = array_module(out[name])
        out[name][...] = np.asarray(value) if xp is np else xp.from_dlpack(value)
        written(out, name)
