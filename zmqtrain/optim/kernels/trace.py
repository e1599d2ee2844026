"""Tracing a formula to C++: it is called with symbols instead of arrays and numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from zmqtrain.optim.formula import Formula, Numbers, element

_OPERATIONS = {
    np.add: "{} + {}",
    np.subtract: "{} - {}",
    np.multiply: "{} * {}",
    np.divide: "{} / {}",
    np.sqrt: "sqrtf({})",
    np.power: "powf({}, {})",
    np.abs: "fabsf({})",
    np.sign: "{0} > 0 ? 1.0f : {0} < 0 ? -1.0f : {0} == 0 ? 0.0f : {0}",  # NaN stays
    np.maximum: "{0} >= {1} || {0} != {0} ? {0} : {1}",  # NaN of either stays
}


@dataclass(frozen=True)
class Source:
    """An elementwise kernel: the names of what it reads and of what it reads and writes."""

    numbers: tuple[str, ...]
    arrays: tuple[str, ...]
    lines: tuple[str, ...]


def trace(
    formula: Formula,
    are_there: Sequence[bool],
    numbers: Numbers,
    *,
    factor: bool,
    l2: bool,
) -> Source:
    """Return the C++ of a whole update (:func:`element`) by this formula.

    ``are_there``: which of w, slots and average exist. The switches in ``numbers`` become part of
    the source. ``g`` is the gradient.
    """
    lines: list[str] = []

    def symbol(name: str, is_there: bool = True) -> _Symbol | None:
        return _Symbol(name, lines) if is_there else None

    names = [f"a{place}" for place in range(len(are_there))]
    w, *slots, average = (symbol(*pair) for pair in zip(names, are_there, strict=True))
    given = [
        number if isinstance(number, bool) else symbol(f"n{place}")
        for place, number in enumerate(numbers)
    ]
    options = {"factor": factor, "scale": True, "l2": l2, "share": average is not None}
    symbols = [symbol(*option) for option in options.items()]
    new = element(formula, w, symbol("g"), tuple(slots), average, tuple(given), *symbols)
    for name, value in zip(names, new, strict=True):
        if value is not None:
            lines.append(f"{name} = {value.name};")
    read = [*(n for n in given if isinstance(n, _Symbol)), *(s for s in symbols if s is not None)]
    return Source(
        tuple(number.name for number in read),
        tuple(name for name, is_there in zip(names, are_there, strict=True) if is_there),
        tuple(lines),
    )


class _Symbol(NDArrayOperatorsMixin):
    """A value of one element; each operation on it becomes a line of C++."""

    def __init__(self, name: str, lines: list[str]) -> None:
        self.name = name
        self._lines = lines

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **_: Any) -> _Symbol:
        operands = [i.name if isinstance(i, _Symbol) else f"{float(i)!r}f" for i in inputs]
        name = f"t{len(self._lines)}"
        self._lines.append(f"const float {name} = {_OPERATIONS[ufunc].format(*operands)};")
        return _Symbol(name, self._lines)
