"""The training of rows by compiled rules, of many tables in one call.

For each block of a table's rows the call copies records into the scratch, updates them there, notes
READY, copies them back, and notes DONE, as ``Tables`` does for other rules. It runs without the
GIL.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

from zmqtrain.optim.kernels.cpu import address_of
from zmqtrain.optim.kernels.loop import counted, engine_of
from zmqtrain.store.table_layout import DONE, READY

_INT, _FLOAT, _VOID = ir.IntType(64), ir.FloatType(), ir.VoidType()
_INTS, _FLOATS, _BYTES = (kind.as_pointer() for kind in (_INT, _FLOAT, ir.IntType(8)))


class Training(NamedTuple):
    """What rows of a table are trained, and how. Addresses stand for arrays and functions."""

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
        run, _ = _compiled(parts, arrays, len(numbers))
        run(len(calls), address_of(calls), address_of(given), words, places)


@cache
def _compiled(parts: int, arrays: int, numbers: int) -> tuple[Any, Any]:
    """Return ``run(n, calls, numbers, words, places)``, and the owner of its code."""
    module = ir.Module()
    kind = ir.FunctionType(_VOID, [_INT, _INTS, _FLOATS, _INTS, _INTS])
    function = ir.Function(module, kind, "run")
    n, calls, given, words, scratch = function.args
    build = ir.IRBuilder(function.append_basic_block())
    numbers_in = [build.load(build.gep(given, [_number(at)])) for at in range(numbers)]
    width = _FIXED + parts + arrays
    with counted(build, _number(0), n, 1) as i:
        row = build.gep(calls, [build.mul(i, _number(width))])
        fields = [build.load(build.gep(row, [_number(at)])) for at in range(width)]
        one = dict(zip(Training._fields, fields, strict=False))
        pointers = [build.inttoptr(field, _FLOATS) for field in fields[_FIXED:]]
        own, own_arrays = pointers[:parts], pointers[parts:]
        places, gradient, records = (
            build.inttoptr(one[name], kind)
            for name, kind in (("places", _INTS), ("gradient", _FLOATS), ("records", _BYTES))
        )
        with counted(build, one["begin"], one["rows"], one["block"]) as begin:
            end = build.add(begin, one["block"])
            end = build.select(build.icmp_signed("<", end, one["rows"]), end, one["rows"])
            size, first = build.sub(end, begin), build.gep(places, [begin])
            elements = build.mul(size, one["dim"])
            its_gradient = build.gep(gradient, [build.mul(begin, one["dim"])])
            _call(build, one["gather"], size, first, records, *own)
            _call(
                build, one["update"], _number(0), elements, its_gradient, *own_arrays, *numbers_in
            )
            with counted(build, _number(0), size, 1) as j:
                build.store(build.load(build.gep(first, [j])), build.gep(scratch, [j]))
            position = build.or_(one["position"], end)
            _note(build, words, READY, position)
            _call(build, one["scatter"], size, first, records, one["stamp"], *own)
            _note(build, words, DONE, position)
    build.ret_void()
    _, engine = engine_of(module)
    types = ctypes.c_int64, *[ctypes.c_void_p] * 4
    return ctypes.CFUNCTYPE(None, *types)(engine.get_function_address("run")), engine


def _call(build: ir.IRBuilder, address: ir.Value, *given: ir.Value) -> None:
    kind = ir.FunctionType(_VOID, [value.type for value in given])
    build.call(build.inttoptr(address, kind.as_pointer()), given)


def _note(build: ir.IRBuilder, words: ir.Value, word: int, value: ir.Value) -> None:
    """Set a word between barriers, as ``_note`` of optim/kernels/loop.py does."""
    build.fence("release")
    build.store(value, build.gep(words, [_number(word)]))
    build.fence("release")


def _number(value: int) -> ir.Constant:
    return ir.Constant(_INT, value)
