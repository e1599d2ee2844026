"""The global norm of a gradient, and clipping by it.

The norm needs every variable, so the worker computes it before the gradient is cut into shards.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite, sqrt
from typing import Any, TypeAlias

import numpy as np

from zmqtrain.compute.arrays import DEVICE_BLOCK_SIZE, blocks

Array: TypeAlias = Any
"""A float32 NumPy or CuPy array of any shape."""

_HOST_BLOCK = 16_384  # elements; its float64 copy stays in cache


def global_norm(gradients: Mapping[str, Array]) -> float:
    """Return the Euclidean norm of all gradients as one vector, 0.0 if there are none.

    Squares are taken and added in float64: the norm is finite unless an element is not.
    """
    return sqrt(sum(float(sum_of_squares(gradient)) for gradient in gradients.values()))


def clip_by_global_norm(gradients: Mapping[str, Array], norm: float) -> float:
    """Scale the gradients in place by norm / max(norm, global norm); return the latter.

    This is tf.clip_by_global_norm. A gradient no longer than ``norm`` is not changed. Nor is one
    whose norm is NaN or infinite, so that it is still recognised later.
    """
    length = global_norm(gradients)
    if isfinite(length) and length > norm:
        scale = norm / length
        for gradient in gradients.values():
            gradient *= scale
    return length


def sum_of_squares(array: Array) -> Array:
    """Return the sum of all squares, a float64 scalar on the device of ``array``."""
    flat = array.reshape(-1)
    length = _HOST_BLOCK if isinstance(array, np.ndarray) else DEVICE_BLOCK_SIZE
    total: Array = 0.0
    for block in blocks(flat.size, length):
        wide = flat[block].astype(np.float64)
        wide *= wide
        total = total + wide.sum()
    return total
