"""The fused kernels for the CPU: one loop each, compiled by Numba when it is first asked for.

Arithmetic is IEEE float32 in the order of the NumPy rules, so a kernel gives their numbers exactly,
on every processor and however the memory is cut into runs. Numba's ``fastmath`` would void that,
for nothing: beyond the cache a loop is bound by the memory. What keeps a loop fast is that it
vectorises, for which it needs ``error_model="numpy"`` (no exception from a division) and no store
under a condition: whether an optional array is there is known when its kernel is compiled. Switches
between two values cost nothing. The formulas are explained with the rules.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import numba
import numpy as np

from zmqtrain.optim.base import Flat

log = logging.getLogger(__name__)

_ZERO = np.float32(0)

# What the annotations of the kernels stand for. A gradient may lie in a received frame, read-only
# and at any address.
_TYPES = {
    "Flat": numba.float32[::1],
    "Gradient": numba.types.Array(numba.float32, 1, "C", readonly=True, aligned=False),
    "np.float32": numba.float32,
    "bool": numba.boolean,
}
Gradient = Flat


def sgd(
    w: Flat, g: Gradient, average: Flat | None, share: np.float32, l2: np.float32, rate: np.float32
) -> None:
    for i in range(w.size):
        gradient = g[i] + l2 * w[i] if l2 else g[i]
        new = w[i] - rate * gradient
        w[i] = new
        if average is not None:
            average[i] += (new - average[i]) * share


def momentum(
    w: Flat,
    g: Gradient,
    momentum: Flat,
    average: Flat | None,
    share: np.float32,
    l2: np.float32,
    rate: np.float32,
    decay: np.float32,
    nesterov: bool,
    scaled_velocity: bool,
) -> None:
    for i in range(w.size):
        gradient = g[i] + l2 * w[i] if l2 else g[i]
        if scaled_velocity:
            descent = rate * gradient
            a = decay * momentum[i] - descent
            new = w[i] - descent + decay * a if nesterov else w[i] + a
        else:
            a = decay * momentum[i] + gradient
            new = w[i] - rate * (decay * a + gradient if nesterov else a)
        momentum[i] = a
        w[i] = new
        if average is not None:
            average[i] += (new - average[i]) * share


def adagrad(
    w: Flat,
    g: Gradient,
    accumulator: Flat,
    average: Flat | None,
    share: np.float32,
    l2: np.float32,
    rate: np.float32,
    inner: np.float32,
    outer: np.float32,
) -> None:
    for i in range(w.size):
        gradient = g[i] + l2 * w[i] if l2 else g[i]
        a = accumulator[i] + gradient * gradient
        accumulator[i] = a
        new = w[i] - gradient / (np.sqrt(a + inner) + outer) * rate
        w[i] = new
        if average is not None:
            average[i] += (new - average[i]) * share


def rmsprop(
    w: Flat,
    g: Gradient,
    mean_square: Flat,
    mean_gradient: Flat | None,
    momentum: Flat | None,
    average: Flat | None,
    share: np.float32,
    l2: np.float32,
    rate: np.float32,
    mean_share: np.float32,
    decay: np.float32,
    inner: np.float32,
    outer: np.float32,
) -> None:
    for i in range(w.size):
        gradient = g[i] + l2 * w[i] if l2 else g[i]
        square = mean_square[i] + (gradient * gradient - mean_square[i]) * mean_share
        mean_square[i] = square
        if mean_gradient is not None:
            mean = mean_gradient[i] + (gradient - mean_gradient[i]) * mean_share
            mean_gradient[i] = mean
            square -= mean * mean
            square = _ZERO if square < _ZERO else square  # NaN stays
        descent = gradient / (np.sqrt(square + inner) + outer) * rate
        if momentum is not None:
            descent += decay * momentum[i]
            momentum[i] = descent
        new = w[i] - descent
        w[i] = new
        if average is not None:
            average[i] += (new - average[i]) * share


def adam(
    w: Flat,
    g: Gradient,
    m: Flat,
    v: Flat,
    average: Flat | None,
    share: np.float32,
    l2: np.float32,
    alpha: np.float32,
    beta1: np.float32,
    share1: np.float32,
    share2: np.float32,
    epsilon: np.float32,
    nesterov: bool,
) -> None:
    for i in range(w.size):
        gradient = g[i] + l2 * w[i] if l2 else g[i]
        mean = m[i] + (gradient - m[i]) * share1
        square = v[i] + (gradient * gradient - v[i]) * share2
        m[i] = mean
        v[i] = square
        direction = beta1 * mean + share1 * gradient if nesterov else mean
        new = w[i] - alpha * direction / (np.sqrt(square) + epsilon)
        w[i] = new
        if average is not None:
            average[i] += (new - average[i]) * share


def ftrl(
    w: Flat,
    g: Gradient,
    accumulator: Flat,
    linear: Flat,
    average: Flat | None,
    share: np.float32,
    l2: np.float32,
    per_rate: np.float32,
    ridge: np.float32,
    shrinkage: np.float32,
    l1: np.float32,
) -> None:
    for i in range(w.size):
        gradient = g[i] + l2 * w[i] if l2 else g[i]
        before = np.sqrt(accumulator[i])
        n = accumulator[i] + gradient * gradient
        after = np.sqrt(n)
        z = linear[i] + gradient - ((after - before) * per_rate - shrinkage) * w[i]
        accumulator[i] = n
        linear[i] = z
        clipped = -l1 if z < -l1 else l1 if z > l1 else z
        new = (clipped - z) / (after * per_rate + ridge)
        w[i] = new
        if average is not None:
            average[i] += (new - average[i]) * share


def scaled_sum(out: Flat, a: Gradient, b: Gradient, scale: np.float32) -> None:
    for i in range(out.size):
        out[i] = (a[i] + b[i]) * scale


_KERNELS: dict[str, Callable[..., None]] = {
    kernel.__name__: kernel for kernel in (sgd, momentum, adagrad, rmsprop, adam, ftrl, scaled_sum)
}


@cache
def load(name: str, absent: frozenset[str] = frozenset()) -> Callable[..., None]:
    """Return a kernel compiled for calls that pass None for the arrays named in ``absent``.

    Its code is cached, beside this file or else in the user's cache directory, so compiling takes
    its 0.2 to 0.8 s once. The kernel runs without the GIL.
    """
    kernel = _KERNELS[name]
    signature = tuple(
        numba.none
        if parameter.name in absent
        else _TYPES[parameter.annotation.removesuffix(" | None")]
        for parameter in inspect.signature(kernel).parameters.values()
    )
    try:
        return _compiled(kernel, signature, cache=True)
    except Exception as error:  # nowhere to write, a full disk, or whatever a damaged file gives
        log.info("kernel %s is compiled without a cache: %r", name, error)
        return _compiled(kernel, signature, cache=False)


def _compiled(
    kernel: Callable[..., None], signature: tuple[Any, ...], cache: bool
) -> Callable[..., None]:
    compiled: Callable[..., None] = numba.njit(
        signature, nogil=True, error_model="numpy", cache=cache
    )(kernel)
    return compiled
