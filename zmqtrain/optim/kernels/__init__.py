"""Fused kernels: each rule as one loop over memory, compiled for the CPU or for a GPU.

A rule's kernel does the whole update, L2 and the moving average included. Which kernel belongs to
which rule, and what it takes of it, is said here and nowhere else.

Beside the rules only ``scaled_sum`` has a kernel: NumPy's sums and products of two arrays run at
the speed of the memory as they are.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeAlias

import numpy as np

from zmqtrain.compute.arrays import Flat
from zmqtrain.optim.base import Rule
from zmqtrain.optim.kernels.base import Backend, Operands
from zmqtrain.optim.redo import Redo
from zmqtrain.optim.rules import SGD, Adagrad, Adam, Ftrl, Momentum, RMSProp

log = logging.getLogger(__name__)

_ONE = np.float32(1)


BoundKernel: TypeAlias = Callable[[Flat, np.float32, int, int], None]
"""Applies a gradient, with the average's share, at a step, to the run from an element on."""


@dataclass(frozen=True, slots=True)
class Signature:
    """A rule's kernel and what it takes: slots, and attributes of the rule that are switches."""

    kernel: str
    slots: tuple[str, ...] = ()
    switches: tuple[str, ...] = ()


SIGNATURES: dict[type[Rule], Signature] = {
    SGD: Signature("sgd"),
    Momentum: Signature("momentum", ("momentum",), ("nesterov", "scaled_velocity")),
    Adagrad: Signature("adagrad", ("accumulator",)),
    RMSProp: Signature("rmsprop", ("mean_square", "mean_gradient", "momentum")),
    Adam: Signature("adam", ("m", "v"), ("nesterov",)),
    Ftrl: Signature("ftrl", ("accumulator", "linear")),
}


@dataclass(frozen=True, slots=True)
class FusedRule:
    """One of zmqtrain's rules together with its kernel."""

    rule: Any  # of a type in SIGNATURES
    signature: Signature
    backend: Backend

    def bind(
        self,
        parameters: Flat,
        slots: Mapping[str, Flat],
        average: str | None,
        l2: np.float32,
        redo: Redo | None,
    ) -> BoundKernel | None:
        """Return the kernel for this memory, compiled if need be; None if that cannot be.

        ``average`` names the slot of the moving average. The kernel does what the rule's own
        ``update`` does, with L2 before and the average behind it.
        """
        own = {slot.name for slot in self.rule.slots}
        names = [name if name in own else None for name in self.signature.slots]

        def chosen(parameters: Flat, slots: Mapping[str, Flat]) -> tuple[Flat | None, ...]:
            others = (None if name is None else slots[name] for name in (*names, average))
            return (parameters, *others)

        operands = Operands(chosen(parameters, slots), l2)
        if redo is not None:
            areas = chosen(redo.areas[0], dict(zip(slots, redo.areas[1:], strict=True)))
            operands = replace(operands, areas=areas, progress=redo.progress)
        code = _loaded(self.backend, self.signature.kernel, operands.present, redo is not None)
        if code is None:
            return None
        kernel = self.backend.bind(code, operands)
        hyperparameters = self.rule.hyperparameters
        switches = tuple(getattr(self.rule, name) for name in self.signature.switches)

        def update(gradient: Flat, share: np.float32, step: int, start: int) -> None:
            kernel(gradient, start, share, hyperparameters(step) + switches)

        return update


def find(rule: Rule, like: Flat) -> FusedRule | None:
    """Return ``rule`` with its kernel for memory such as ``like``; None if it has none.

    Rules of a third party have none, one derived from ours included. Nor has an Ftrl of an unusual
    power: NumPy's power is vectorised, that of compiled loops is not.
    """
    signature = SIGNATURES.get(type(rule))
    if isinstance(rule, Ftrl) and rule.learning_rate_power != -0.5:
        return None
    backend = backend_of(like) if signature else None
    return FusedRule(rule, signature, backend) if signature and backend else None


def mean(
    gradients: Sequence[Flat], count: int, scratch: Sequence[Flat], *, fused: bool = True
) -> Flat:
    """Return the sum of ``gradients``, added in this order, divided by ``count``.

    The result, and what comes before it, lies in the two buffers of ``scratch``; all arrays have
    one shape (n,). Without ``fused`` no kernel is loaded.
    """
    add = scaled_sum if fused else _scaled_sum
    scale = np.float32(1 / count)
    out, other = scratch
    total, *others = gradients
    if not others:
        return np.multiply(total, scale, out=out)
    for gradient in others[:-1]:
        add(out, total, gradient, _ONE)
        total, out, other = out, other, out
    add(out, total, others[-1], scale)
    return out


def scaled_sum(out: Flat, a: Flat, b: Flat, scale: np.float32) -> None:
    """out = (a + b) * scale. ``out`` is neither ``a`` nor ``b``."""
    backend = backend_of(out)
    if backend is None:
        _scaled_sum(out, a, b, scale)
    else:
        backend.scaled_sum(out, a, b, scale)


def _scaled_sum(out: Flat, a: Flat, b: Flat, scale: np.float32) -> None:
    with np.errstate(all="ignore"):
        np.add(a, b, out=out)
        np.multiply(out, scale, out=out)


def backend_of(array: Flat) -> Backend | None:
    """Return the kernels for memory such as ``array``, None where there can be none.

    Never imports CuPy: where nobody has imported it, no array can be one of its own.
    """
    device_array = getattr(sys.modules.get("cupy"), "ndarray", None)
    if device_array is not None and isinstance(array, device_array):
        from zmqtrain.optim.kernels import gpu

        return gpu
    return _cpu()


@cache
def _cpu() -> Backend | None:
    try:
        from zmqtrain.optim.kernels import cpu

        cpu.load_scaled_sum()  # the smallest shows whether there can be kernels
    except Exception as error:
        _lament(repr(error))
        return None
    return cpu


@cache
def _loaded(backend: Backend, name: str, present: tuple[bool, ...], guarded: bool) -> Any:
    """Return a kernel's code, None if it cannot be had; that is tried once."""
    try:
        return backend.load(name, present, guarded)
    except Exception as error:
        _lament(repr(error))
        return None


@cache
def _lament(why: str) -> None:
    """Tell, once for each reason, why there are no kernels."""
    log.warning("updates run in NumPy, several times slower, for want of kernels: %s", why)
