"""Checks of one real step of a model: is the gradient written, finite, and correct?

A correct gradient is the slope of the loss. The slope is measured by central differences
(L(p + h v) - L(p - h v)) / 2h along directions v: some random elements of each variable, and one
direction through all its elements. It is measured in float64 if the model computes in float64. A
loss in float32 is coarse, so only large errors show; the tolerance takes this into account.

Where a loss has kinks, as with ReLU, the two differ although the gradient is correct. So before a
gradient is called wrong, its mean between p - h v and p + h v is compared, which a central
difference equals for every continuous loss with a correct gradient.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from zmqtrain.errors import ConfigError
from zmqtrain.models.base import Batch, Gradients, Model, Parameters
from zmqtrain.models.checks import checked_loss
from zmqtrain.models.rows import RowGradient, TableReader
from zmqtrain.models.trees import are_rows
from zmqtrain.units import shortened

ELEMENTS = 4
"""Single elements of each variable for which the slope is measured."""

NODES = 17
"""Points of a segment at which the gradient is computed for its mean."""

ROWS = 16
"""Examples for which slopes are measured: the loss is computed 20 times for each variable."""

SECONDS = 10.0
"""Time limit; the remaining variables are skipped."""

RELATIVE_TOLERANCE = 0.01
_DOUBLE_NOISE, _SINGLE_NOISE = 1e-13, 1e-6
_DOUBLE_STEP, _SINGLE_STEP = 1e-5, 1e-2
"""Relative errors of a loss in float64 and float32, and steps that balance them against h**2."""

Arrays: TypeAlias = dict[str, NDArray[Any]]


def mistakes_of_a_step(
    model: Model,
    parameters: Arrays,
    batch: Batch,
    state: Mapping[str, Any] = MappingProxyType({}),
    frozen: Mapping[str, Any] = MappingProxyType({}),
    tables: Mapping[str, TableReader] = MappingProxyType({}),
) -> Iterator[str]:
    """Yield a text for each mistake in the loss and the gradient of one batch.

    ``parameters``: the trained variables; ``state`` and ``frozen``: the model's other ones;
    ``tables``: those whose rows it reads, of which no gradient is checked.

    Raises:
        ConfigError: the model raises.
    """
    before = {name: value.copy() for name, value in parameters.items()}
    out = {name: np.full_like(value, np.nan) for name, value in parameters.items()}
    others = state, frozen, tables
    loss = _Objective(model, batch, *others).compute(parameters, out)
    if not math.isfinite(loss):  # then the gradient means nothing
        yield f"the loss of the first batch is {loss}; expected a finite number"
        return
    wrong = list(_check_arrays(before, parameters, out))
    if out and not wrong and not any(np.any(gradient) for gradient in out.values()):
        wrong.append("every gradient is 0, so nothing would be learned; expected the loss's slope")
    yield from wrong
    if not wrong:
        rows = tuple(array[:ROWS] for array in batch) if are_rows(batch) else batch
        yield from _check_slopes(_Objective(model, rows, *others), parameters)


def _check_arrays(before: Arrays, parameters: Arrays, out: dict[str, Any]) -> Iterator[str]:
    for name in sorted(out.keys() - before.keys()):
        yield f"a gradient of {name!r} is written, which is not a parameter"
    missing = []
    for name, value in before.items():
        gradient = out[name]
        if not np.array_equal(value, parameters[name]):
            yield f"loss_and_gradients() writes to parameter {name!r}; it must only read parameters"
        if np.shape(gradient) != value.shape:
            yield (
                f"the gradient of {name!r} has shape {np.shape(gradient)}; expected {value.shape}; "
                "write it into the given buffer, with out= or [...]"
            )
        elif np.isnan(gradient).all():
            missing.append(repr(name))
        elif not np.isfinite(gradient).all():
            count = np.size(gradient) - np.count_nonzero(np.isfinite(gradient))
            yield (
                f"{count} of {np.size(gradient)} elements of the gradient of {name!r} are NaN or "
                "infinite, or not written"
            )
    if missing:
        yield (
            f"the gradient of {shortened(missing)} is NaN, not written, or added to the buffer's "
            "old values; buffers are not cleared between steps: overwrite every element"
        )


@dataclass(frozen=True)
class _Objective:
    """The loss of one batch as a function of the parameters: it always begins with one state."""

    model: Model
    batch: Batch
    state: Mapping[str, Any]
    frozen: Mapping[str, Any]
    tables: Mapping[str, TableReader]

    def compute(self, parameters: Parameters, out: Gradients) -> float:
        """Write the gradients into ``out``; return the loss."""
        values = {**parameters, **self.state, **self.frozen}
        buffers = {**out, **{name: value.copy() for name, value in self.state.items()}}
        for name, reader in self.tables.items():
            reader.begin()
            values[name], buffers[name] = reader, RowGradient(reader.variable)
        loss = checked_loss(self.model, values, self.batch, buffers)
        rest = buffers.keys() - self.state.keys() - self.tables.keys()
        out.update({name: buffers[name] for name in rest})
        return loss

    def loss(self, parameters: Parameters) -> float:
        return self.compute(parameters, {n: np.zeros_like(v) for n, v in parameters.items()})


@dataclass(frozen=True)
class _Precision:
    """The precision of the loss: its type, its error, and a step that suits both."""

    dtype: type[np.floating[Any]]
    step: float
    noise: float


def _check_slopes(of: _Objective, parameters: Arrays) -> Iterator[str]:
    precision = _precision(of, parameters)
    if precision is None:
        return  # the loss differs from call to call, as with dropout
    point = {name: value.astype(precision.dtype) for name, value in parameters.items()}
    gradients = {name: np.zeros_like(value) for name, value in point.items()}
    of.compute(point, gradients)
    random, until = np.random.default_rng(0), time.monotonic() + SECONDS
    for name in map(str, random.permutation(list(gradients))):
        if time.monotonic() > until:
            return
        gradient = gradients[name]
        for direction, where in _directions(gradient, random):
            stated = float(np.sum(gradient * direction, dtype=np.float64))
            measured, error = _slope(of, point, name, direction, precision)
            tolerance = RELATIVE_TOLERANCE * max(abs(stated), abs(measured)) + error
            if abs(stated - measured) > tolerance:
                stated, measured, error = _mean_slope(of, point, name, direction, precision)
                tolerance = RELATIVE_TOLERANCE * max(abs(stated), abs(measured)) + error
            if abs(stated - measured) > tolerance:
                yield (
                    f"the gradient of {name!r} is wrong {where}: the model computes "
                    f"{stated:.6g}, but the slope of the loss is {measured:.6g} "
                    f"(+- {tolerance:.2g})"
                )
                break


def _directions(
    gradient: NDArray[Any], random: np.random.Generator
) -> Iterator[tuple[NDArray[Any], str]]:
    """Yield unit vectors of the gradient's shape, each with a text that describes it."""
    count = min(ELEMENTS, gradient.size)
    for flat in random.choice(gradient.size, count, replace=False):
        direction = np.zeros_like(gradient)
        direction.flat[flat] = 1
        index = [int(i) for i in np.unravel_index(flat, gradient.shape)]
        yield direction, f"at {index}" if index else "there"
    signs = random.choice([-1.0, 1.0], gradient.shape)
    yield np.asarray(signs / math.sqrt(gradient.size), gradient.dtype), "in a random direction"


def _slope(
    of: _Objective, point: Arrays, name: str, direction: NDArray[Any], precision: _Precision
) -> tuple[float, float]:
    """Return the slope of the loss along a direction, and its possible error.

    The error is estimated from two step sizes; it is large at a kink, such as that of ReLU.
    """

    def central(step: float) -> float:
        losses = []
        for sign in (1, -1):
            moved = point[name] + precision.dtype(sign * step) * direction
            losses.append(of.loss(point | {name: moved}))
        return (losses[0] - losses[1]) / (2 * step)

    near, far = central(precision.step), central(2 * precision.step)
    return near, 2 * abs(near - far) + precision.noise / precision.step


def _mean_slope(
    of: _Objective, point: Arrays, name: str, direction: NDArray[Any], precision: _Precision
) -> tuple[float, float, float]:
    """Return the mean of the gradient along a segment, the slope between its ends, and the error.

    The mean is that of the trapezoidal rule. Its error is at most half of what the gradient changes
    from node to node if it rises or falls between two of them, as at one kink.
    """
    losses, stated = [], []
    for place in np.linspace(-1, 1, NODES):
        moved = point[name] + precision.dtype(place * precision.step) * direction
        out: Arrays = {each: np.zeros_like(value) for each, value in point.items()}
        losses.append(of.compute(point | {name: moved}, out))
        stated.append(float(np.sum(out[name] * direction, dtype=np.float64)))
    mean = float(np.mean(np.add(stated[1:], stated[:-1]))) / 2
    error = float(np.mean(np.abs(np.diff(stated)))) / 2
    slope = (losses[-1] - losses[0]) / (2 * precision.step)
    return mean, slope, error + precision.noise / precision.step


def _precision(of: _Objective, parameters: Arrays) -> _Precision | None:
    """Return the precision of the model's loss; None if equal calls give different losses.

    Tiny equal steps change a loss in float64 by equal steps, one in float32 not at all or in jumps.
    """
    point = {name: value.astype(np.float64) for name, value in parameters.items()}
    try:
        losses = [
            of.loss({name: value + step * 1e-9 for name, value in point.items()})
            for step in (0, 0, 1, 2, 3)
        ]
    except ConfigError:  # it accepts only float32
        losses = [of.loss(parameters) for _ in range(2)]
    if losses[0] != losses[1]:
        return None
    scale = max(1.0, abs(losses[0]))
    jumps = np.abs(np.diff(losses[1:], 2))
    if len(set(losses)) > 1 and jumps.max() < 10 * _DOUBLE_NOISE * scale:
        return _Precision(np.float64, _DOUBLE_STEP, _DOUBLE_NOISE * scale)
    return _Precision(np.float32, _SINGLE_STEP, _SINGLE_NOISE * scale)
