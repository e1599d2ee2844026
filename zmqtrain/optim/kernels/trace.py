"""Tracing a formula: it is called with symbols, which note each operation instead of doing it.

The CPU's loop (loop.py) and the source of a GPU's kernel are written from what was noted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from zmqtrain.optim.formula import Common, Formula, element, total

Operand: TypeAlias = str | float
"""The name of a value, or a constant."""


@dataclass(frozen=True)
class Operation:
    """``name`` = ``ufunc`` (operands)."""

    name: str
    ufunc: np.ufunc
    operands: tuple[Operand, ...]


@dataclass(frozen=True)
class Trace:
    """An update of one element.

    ``arrays``: names of the elements that it reads and writes; ``results``: of their new values;
    ``numbers``: of those that all elements share; ``gradients``: of elements that it only reads.
    """

    arrays: tuple[str, ...]
    results: tuple[str, ...]
    numbers: tuple[str, ...]
    operations: tuple[Operation, ...]
    gradients: tuple[str, ...] = ("g",)


def trace(
    formula: Formula,
    are_there: Sequence[bool],
    switches: Sequence[bool | None],
    *,
    factor: bool,
    l2: bool,
) -> Trace:
    """Return the trace of a whole update (:func:`element`) by this formula.

    ``are_there``: which of w, slots and average exist. ``switches``: for each number of the formula
    its value if it is a switch, else None.
    """
    noted: list[Operation] = []

    def symbol(name: str, is_there: bool = True) -> _Symbol | None:
        return _Symbol(name, noted) if is_there else None

    arrays = [symbol(f"a{place}", is_there) for place, is_there in enumerate(are_there)]
    w, *slots, average = arrays
    numbers = [symbol(f"n{n}") if switch is None else switch for n, switch in enumerate(switches)]
    options = {"factor": factor, "scale": True, "l2": l2, "share": average is not None}
    common = Common(*(symbol(*option) for option in options.items()))
    new = element(formula, w, symbol("g"), tuple(slots), average, tuple(numbers), common)
    return Trace(
        tuple(each.name for each in arrays if each is not None),
        tuple(each.name for each in new if each is not None),
        tuple(each.name for each in (*numbers, *common) if isinstance(each, _Symbol)),
        tuple(noted),
    )


def trace_of_sum(terms: int) -> Trace:
    """Return the trace that sets one array to the :func:`total` of this number of gradients."""
    noted: list[Operation] = []
    gradients, weights = ([f"{kind}{n}" for n in range(terms)] for kind in "gw")
    numbers = *weights, "factor", "limit"
    own, others = ([_Symbol(name, noted) for name in names] for names in (gradients, numbers))
    result = total(own, others[:terms], *others[terms:])
    return Trace(("a0",), (result.name,), numbers, tuple(noted), tuple(gradients))


class _Symbol(NDArrayOperatorsMixin):
    """A value of one element."""

    def __init__(self, name: str, noted: list[Operation]) -> None:
        self.name = name
        self._noted = noted

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **_: Any) -> _Symbol:
        operands = tuple(each.name if isinstance(each, _Symbol) else float(each) for each in inputs)
        name = f"t{len(self._noted)}"
        self._noted.append(Operation(name, ufunc, operands))
        return _Symbol(name, self._noted)
