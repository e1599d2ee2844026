"""The fused kernels for a GPU: one elementwise kernel of CuPy each.

The arithmetic is that of the kernels for the CPU, operation by operation, and without fused
multiply-add, so that both give the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import cupy
import numpy as np

from zmqtrain.compute.arrays import Flat
from zmqtrain.optim.kernels.base import Kernel, Numbers, Operands


@dataclass(frozen=True, slots=True)
class Source:
    """One kernel: the names of what it takes, in order, and its C++ for one element.

    For every array in ``arrays`` there is a flag ``has_<name>``: without it the array is not there
    and its name must not be used. ``gradient`` is the gradient with L2; ``w`` is assigned once.
    """

    arrays: tuple[str, ...]
    hyperparameters: tuple[str, ...]
    switches: tuple[str, ...]
    operation: str


_BEFORE = "const float gradient = l2 != 0 ? g + l2 * w : g;"
_AFTER = "if (has_average) average += (w - average) * share;"

_SOURCES = {
    "sgd": Source((), ("rate",), (), "w -= rate * gradient;"),
    "momentum": Source(
        ("momentum",),
        ("rate", "decay"),
        ("nesterov", "scaled_velocity"),
        """
        if (scaled_velocity) {
            const float descent = rate * gradient;
            momentum = decay * momentum - descent;
            w = nesterov ? w - descent + decay * momentum : w + momentum;
        } else {
            momentum = decay * momentum + gradient;
            w -= rate * (nesterov ? decay * momentum + gradient : momentum);
        }
        """,
    ),
    "adagrad": Source(
        ("accumulator",),
        ("rate", "inner", "outer"),
        (),
        """
        accumulator += gradient * gradient;
        w -= gradient / (sqrtf(accumulator + inner) + outer) * rate;
        """,
    ),
    "rmsprop": Source(
        ("mean_square", "mean_gradient", "momentum"),
        ("rate", "mean_share", "decay", "inner", "outer"),
        (),
        """
        mean_square += (gradient * gradient - mean_square) * mean_share;
        float square = mean_square;
        if (has_mean_gradient) {
            mean_gradient += (gradient - mean_gradient) * mean_share;
            square -= mean_gradient * mean_gradient;
            square = square < 0 ? 0.0f : square;
        }
        float descent = gradient / (sqrtf(square + inner) + outer) * rate;
        if (has_momentum) {
            descent += decay * momentum;
            momentum = descent;
        }
        w -= descent;
        """,
    ),
    "adam": Source(
        ("m", "v"),
        ("alpha", "beta1", "share1", "share2", "epsilon"),
        ("nesterov",),
        """
        m += (gradient - m) * share1;
        v += (gradient * gradient - v) * share2;
        const float direction = nesterov ? beta1 * m + share1 * gradient : m;
        w -= alpha * direction / (sqrtf(v) + epsilon);
        """,
    ),
    "ftrl": Source(
        ("accumulator", "linear"),
        ("per_rate", "ridge", "shrinkage", "l1"),
        (),
        """
        const float before = sqrtf(accumulator);
        accumulator += gradient * gradient;
        const float after = sqrtf(accumulator);
        linear = linear + gradient - ((after - before) * per_rate - shrinkage) * w;
        const float clipped = linear < -l1 ? -l1 : linear > l1 ? l1 : linear;
        w = (clipped - linear) / (after * per_rate + ridge);
        """,
    ),
}


def bind(code: Any, operands: Operands) -> Kernel:
    """Return a kernel for these arrays, to be queued on the current stream."""
    arrays, l2 = operands.arrays, operands.l2
    is_there = operands.present[1:]

    def update(gradient: Flat, start: int, share: np.float32, numbers: Numbers) -> None:
        run = slice(start, start + gradient.size)
        given = [array if array is None else array[run] for array in arrays]
        w = given[0]
        given = [w if array is None else array for array in given]
        code(gradient, share, l2, *numbers, *is_there, *given)

    return update


def scaled_sum(out: Flat, a: Flat, b: Flat, scale: np.float32) -> None:
    _load_scaled_sum()(a, b, scale, out)


def load(name: str, present: tuple[bool, ...], guarded: bool) -> Any:
    """Return a kernel of CuPy. One serves for all; none is guarded: no device outlives a process.

    CuPy compiles it at its first call and caches the code.
    """
    return _kernel(name)


@cache
def _kernel(name: str) -> Callable[..., None]:
    source = _SOURCES[name]
    arrays = (*source.arrays, "average")
    kernel: Callable[..., None] = cupy.ElementwiseKernel(
        _declared("float32", "g", "share", "l2", *source.hyperparameters)
        + ", "
        + _declared("bool", *source.switches, *(f"has_{array}" for array in arrays)),
        _declared("float32", "w", *arrays),
        f"{_BEFORE}\n{source.operation}\n{_AFTER}",
        f"zmqtrain_{name}",
        options=("--fmad=false",),
    )
    return kernel


@cache
def _load_scaled_sum() -> Callable[..., None]:
    kernel: Callable[..., None] = cupy.ElementwiseKernel(
        _declared("float32", "a", "b", "scale"),
        _declared("float32", "out"),
        "out = (a + b) * scale;",
        "zmqtrain_scaled_sum",
        options=("--fmad=false",),
    )

    return kernel


def _declared(dtype: str, *names: str) -> str:
    return ", ".join(f"{dtype} {name}" for name in names)
