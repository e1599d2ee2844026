"""The training of rows by compiled rules, of many tables in one call.

For each block of a table's rows the call copies records into the scratch, updates them there, notes
READY, copies them back, and notes DONE, as ``Tables`` does for other rules. It runs without the
GIL.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

from zmqtrain.optim.kernels.cpu import address_of
from zmqtrain.optim.kernels.llvm import (
    BYTES,
    FLOATS,
    INT,
    INTS,
    VOID,
    Builder,
    begun,
    compiled,
    const,
)
from zmqtrain.store.table_layout import DONE, READY


class Training(NamedTuple):
    """The rows of a table that are trained, and how. Addresses stand for arrays and functions."""

    rows: int
    begin: int  # rows that this change has trained before
    block: int  # rows in a block
    dim: int
    places: int
    gradient: int
    records: int
    stamp: int
    position: int  # the word for no row of this table
    gather: int
    update: int
    scatter: int
    parts: tuple[int, ...]  # of the scratch
    arrays: tuple[int, ...]  # those of the parts that the rule changes
    numbers: tuple[float, ...]  # the arguments of the update

    @property
    def kind(self) -> tuple[Any, ...]:
        """Those of one kind may share a call."""
        return len(self.parts), len(self.arrays), self.numbers


_FIXED = 12  # fields of a Training before the first tuple


def train(every: Sequence[Training], words: int, places: int) -> None:
    """Train rows of tables in this order.

    ``words``: address of the words of all tables; ``places``: of the scratch for numbers of
    records.
    """
    for (parts, arrays, numbers), some in groupby(every, key=lambda each: each.kind):
        rows = [(*each[:_FIXED], *each.parts, *each.arrays) for each in some]
        calls, given = np.array(rows, np.int64), np.array(numbers, np.float32)
        run = _compiled(parts, arrays, len(numbers))
        run(len(calls), address_of(calls), address_of(given), words, places)


@cache
def _compiled(parts: int, arrays: int, numbers: int) -> Any:
    """Return ``run(n, calls, numbers, words, places)``."""
    function, build = begun("run", [INT, INTS, FLOATS, INTS, INTS])
    n, calls, given, words, scratch = function.args
    numbers_in = [build.load_at(given, const(at)) for at in range(numbers)]
    width = _FIXED + parts + arrays
    with build.counted(const(0), n) as i:
        row = build.gep(calls, [build.mul(i, const(width))])
        fields = [build.load_at(row, const(at)) for at in range(width)]
        one = dict(zip(Training._fields, fields, strict=False))
        pointers = [build.inttoptr(field, FLOATS) for field in fields[_FIXED:]]
        own, own_arrays = pointers[:parts], pointers[parts:]
        places, gradient, records = (
            build.inttoptr(one[name], kind)
            for name, kind in (("places", INTS), ("gradient", FLOATS), ("records", BYTES))
        )
        with build.counted(one["begin"], one["rows"], one["block"]) as begin:
            end = build.lesser(build.add(begin, one["block"]), one["rows"])
            size, first = build.sub(end, begin), build.gep(places, [begin])
            elements = build.mul(size, one["dim"])
            its_gradient = build.gep(gradient, [build.mul(begin, one["dim"])])
            _call(build, one["gather"], size, first, records, *own)
            _call(build, one["update"], const(0), elements, its_gradient, *own_arrays, *numbers_in)
            build.copied(first, scratch, size)
            position = build.or_(one["position"], end)
            build.note(words, READY, position)
            _call(build, one["scatter"], size, first, records, one["stamp"], *own)
            build.note(words, DONE, position)
    build.ret_void()
    (run,) = compiled(function)
    return run


def _call(build: Builder, address: ir.Value, *given: ir.Value) -> None:
    kind = ir.FunctionType(VOID, [value.type for value in given])
    build.call(build.inttoptr(address, kind.as_pointer()), given)
