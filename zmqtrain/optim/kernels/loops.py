"""What Numba compiles: the formulas of the rules for one element, and the loop they run in.

Arithmetic is IEEE float32 in the order of the NumPy rules, which explain the formulas, so both give
the same numbers. A formula takes the parameter, the gradient, the rule's slots (None for those that
its options leave out), its hyper-parameters and its switches; it returns the new parameter and the
new slots.

The loop stays fast if it vectorises. For that there is no store under a condition: whether an array
is there, and whether the update is guarded, is known when the loop is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numba import types
from numba.extending import intrinsic, overload, register_jitable

from zmqtrain.optim.redo import BLOCK, DONE, READY

New: TypeAlias = tuple[np.float32, tuple[np.float32 | None, ...]]

_ZERO = np.float32(0)


def sgd(w: np.float32, gradient: np.float32, rate: np.float32) -> New:
    return w - rate * gradient, ()


def momentum(
    w: np.float32,
    gradient: np.float32,
    momentum: np.float32,
    rate: np.float32,
    decay: np.float32,
    nesterov: bool,
    scaled_velocity: bool,
) -> New:
    if scaled_velocity:
        descent = rate * gradient
        momentum = decay * momentum - descent
        new = w - descent + decay * momentum if nesterov else w + momentum
    else:
        momentum = decay * momentum + gradient
        new = w - rate * (decay * momentum + gradient if nesterov else momentum)
    return new, (momentum,)


def adagrad(
    w: np.float32,
    gradient: np.float32,
    accumulator: np.float32,
    rate: np.float32,
    inner: np.float32,
    outer: np.float32,
) -> New:
    accumulator += gradient * gradient
    return w - gradient / (np.sqrt(accumulator + inner) + outer) * rate, (accumulator,)


def rmsprop(
    w: np.float32,
    gradient: np.float32,
    mean_square: np.float32,
    mean_gradient: np.float32 | None,
    momentum: np.float32 | None,
    rate: np.float32,
    mean_share: np.float32,
    decay: np.float32,
    inner: np.float32,
    outer: np.float32,
) -> New:
    mean_square += (gradient * gradient - mean_square) * mean_share
    square = mean_square
    if mean_gradient is not None:
        mean_gradient += (gradient - mean_gradient) * mean_share
        square -= mean_gradient * mean_gradient
        square = _ZERO if square < _ZERO else square  # NaN stays
    descent = gradient / (np.sqrt(square + inner) + outer) * rate
    if momentum is not None:
        descent += decay * momentum
        momentum = descent
    return w - descent, (mean_square, mean_gradient, momentum)


def adam(
    w: np.float32,
    gradient: np.float32,
    m: np.float32,
    v: np.float32,
    alpha: np.float32,
    beta1: np.float32,
    share1: np.float32,
    share2: np.float32,
    epsilon: np.float32,
    nesterov: bool,
) -> New:
    m += (gradient - m) * share1
    v += (gradient * gradient - v) * share2
    direction = beta1 * m + share1 * gradient if nesterov else m
    return w - alpha * direction / (np.sqrt(v) + epsilon), (m, v)


def ftrl(
    w: np.float32,
    gradient: np.float32,
    accumulator: np.float32,
    linear: np.float32,
    per_rate: np.float32,
    ridge: np.float32,
    shrinkage: np.float32,
    l1: np.float32,
) -> New:
    before = np.sqrt(accumulator)
    accumulator += gradient * gradient
    after = np.sqrt(accumulator)
    linear = linear + gradient - ((after - before) * per_rate - shrinkage) * w
    clipped = -l1 if linear < -l1 else l1 if linear > l1 else linear
    return (clipped - linear) / (after * per_rate + ridge), (accumulator, linear)


FORMULAS: dict[str, Callable[..., Any]] = {
    formula.__name__: register_jitable(formula)
    for formula in (sgd, momentum, adagrad, rmsprop, adam, ftrl)
}


def loop_of(formula: Callable[..., Any]) -> Callable[..., None]:
    """Return the loop of a formula. It is compiled for one combination of arrays."""

    def loop(
        arrays: Any,
        g: Any,
        start: Any,
        stop: Any,
        share: Any,
        l2: Any,
        numbers: Any,
        areas: Any,
        progress: Any,
    ) -> None:
        """Update a run of ``arrays``: parameters, slots, average; None for those left out.

        ``g``: gradient of the run from ``start`` to ``stop``. With ``progress``, new values go to
        ``areas`` before they go to the arrays: see redo.py.
        """
        length = stop - start if progress is None else BLOCK
        begin = start
        while begin < stop:
            end = min(begin + length, stop)
            out = arrays if progress is None else areas
            first = 0 if progress is None else begin
            for i in range(begin, end):
                old = at(arrays, i)
                gradient = g[i - start] + l2 * old[0] if l2 else g[i - start]
                new, slots = formula(*((old[0], gradient) + old[1:-1] + numbers))  # noqa: RUF005
                values = (new,) + slots + (approached(old[-1], new, share),)  # noqa: RUF005
                put(out, i - first, values)
            if progress is not None:
                in_order()
                progress[READY] = end
                in_order()
                for i in range(begin, end):
                    put(arrays, i, at(areas, i - begin))
                in_order()
                progress[DONE] = end
                in_order()
            begin = end

    return loop


def scaled_sum(out: Any, a: Any, b: Any, scale: Any, size: Any) -> None:
    for i in range(size):
        out[i] = (a[i] + b[i]) * scale


def approached(average: np.float32 | None, target: np.float32, share: np.float32) -> Any:
    """Return the average after it has moved by a share of the way."""
    if average is None:
        return None
    return average + (target - average) * share


def at(arrays: tuple[Any, ...], i: int) -> tuple[Any, ...]:
    """Return the element of every array."""
    return tuple(None if array is None else array[i] for array in arrays)


def put(arrays: tuple[Any, ...], i: int, values: tuple[Any, ...]) -> None:
    """Set the element of every array."""
    for array, value in zip(arrays, values, strict=True):
        if array is not None:
            array[i] = value


def in_order() -> None:
    """Keep the stores before this before those after it: whoever dies between them did the first.

    An interrupted process has done all stores up to some instruction, so only the compiler must
    not change their order; on x86 it costs no instruction.
    """


# What Numba does for these functions: it knows the types of a tuple's items one by one, so each
# function does the first item and leaves the others to itself. It wants no annotations.


def _at(arrays, i):  # type: ignore[no-untyped-def]
    if not len(arrays):
        return lambda arrays, i: ()
    if isinstance(arrays[0], types.NoneType):
        return lambda arrays, i: (None, *at(arrays[1:], i))
    return lambda arrays, i: (arrays[0][i], *at(arrays[1:], i))


def _put(arrays, i, values):  # type: ignore[no-untyped-def]
    if not len(arrays):
        return lambda arrays, i, values: None
    if isinstance(arrays[0], types.NoneType):
        return lambda arrays, i, values: put(arrays[1:], i, values[1:])

    def put_first(arrays, i, values):  # type: ignore[no-untyped-def]
        arrays[0][i] = values[0]
        put(arrays[1:], i, values[1:])

    return put_first


def _approached(average, target, share):  # type: ignore[no-untyped-def]
    if isinstance(average, types.NoneType):
        return lambda average, target, share: None
    return lambda average, target, share: average + (target - average) * share


def _in_order() -> Callable[[], None]:
    def fence(typing_context: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            builder.fence("release")
            return context.get_dummy_value()

        return types.none(), generate

    emit: Any = intrinsic(fence)
    return lambda: emit()


overload(at)(_at)
overload(put)(_put)
overload(in_order)(_in_order)
overload(approached, inline="always")(_approached)
