"""Updates in NumPy or CuPy, block by block: the reference for all kernels."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from zmqtrain.compute.arrays import Flat, block_size, blocks
from zmqtrain.optim.formula import Common, approach, at, element, put
from zmqtrain.optim.kernels.base import Operands, Scalars


class FormulaKernel:
    """A formula, run on arrays."""

    def __init__(self, operands: Operands) -> None:
        self._operands = operands
        self._arrays, self._copies = operands.arrays, operands.copies

    def __call__(self, gradient: Flat, start: int, scalars: Scalars) -> None:
        rule, l2 = self._operands.rule, self._operands.l2
        _, numbers, scale, share, factor, direction = scalars
        for block, own in _blocks(self._operands, gradient, start):
            w, *slots, average = here = at(self._arrays, block)
            formula, length = rule.formula, factor
            if direction is not None:
                here_of_it = direction[block.start - start : block.stop - start]
                formula, length = partial(_moved, rule, here_of_it, factor), None
            with np.errstate(all="ignore"):
                common = Common(length, scale, l2, share)
                new = element(formula, w, own, tuple(slots), average, numbers, common)
            put(here if self._copies is None else at(self._copies, slice(0, len(own))), new)


def _moved(
    rule: Any, direction: Flat, factor: np.float32 | None, w: Flat, g: Flat, *others: Any
) -> tuple[Any, ...]:
    """Be the formula of a MatrixRule for elements of a variable that it sees."""
    _, *slots = rule.formula(w, g, *others)
    return rule.moved(w, direction, factor, others), *slots


class RuleKernel:
    """A rule with an ``update`` of its own."""

    def __init__(self, operands: Operands) -> None:
        self._operands = operands

    def __call__(self, gradient: Flat, start: int, scalars: Scalars) -> None:
        operands, step, scale, share = self._operands, scalars.step, scalars.scale, scalars.share
        for block, own in _blocks(operands, gradient, start):
            w, slots = operands.parameters[block], {n: s[block] for n, s in operands.slots.items()}
            if operands.redo is not None:
                old = (w, *slots.values())
                w, *copies = (copy[: len(own)] for copy in operands.redo.copies)
                put((w, *copies), old)
                slots = dict(zip(slots, copies, strict=True))
            with np.errstate(all="ignore"):
                g = own * scale
                if operands.l2 is not None:
                    g += operands.l2 * w
                operands.rule.update(w, g, slots, step)
                if operands.average is not None:
                    average = slots[operands.average]
                    average[...] = approach(average, w, share)


def _blocks(operands: Operands, gradient: Flat, start: int) -> Iterator[tuple[slice, Flat]]:
    """Yield the remaining blocks of a gradient, also an empty one, since the rule may raise."""
    stop = start + len(gradient)
    if not len(gradient):
        yield slice(start, stop), gradient
    elif operands.redo is None:
        for block in blocks(stop, block_size(gradient), start):
            yield block, gradient[block.start - start : block.stop - start]
    else:
        for block, _ in operands.redo.blocks(stop):
            yield block, gradient[block.start - start : block.stop - start]
