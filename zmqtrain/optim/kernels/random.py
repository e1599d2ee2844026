"""Initial rows of tables, compiled by LLVM: those of models/tables.py, bit for bit."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir

from zmqtrain.models.tables import Ids, Initial, Normal, Rows, Uniform
from zmqtrain.optim.kernels.cpu import address_of
from zmqtrain.optim.kernels.llvm import FLOAT, FLOATS, INT, INTS, Builder, begun, compiled, const

GOLDEN = 0x9E3779B97F4A7C15


def mixed(build: Builder, word: ir.Value) -> ir.Value:
    """Build the finaliser of SplitMix64: see ``mixed`` in models/tables.py."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        word = build.xor(word, build.lshr(word, const(shift)))
        word = build.mul(word, const(factor))
    return build.xor(word, build.lshr(word, const(31)))


def initial_rows(initial: Initial, key: int, ids: Ids, dim: int) -> Rows:
    """Return what ``initial.rows(key, ids, dim)`` returns."""
    match initial:
        case Uniform(limit):
            kind, scale = "uniform", limit
        case Normal(std):
            kind, scale = "normal", std / 2**16
        case _:
            rows = np.ascontiguousarray(initial.rows(key, ids, dim), np.float32)
            return rows.reshape(len(ids), dim)  # or refuse what compiled code cannot read
    ids = np.ascontiguousarray(ids)
    rows = np.empty((len(ids), dim), np.float32)
    _compiled(kind)(len(ids), dim, key, scale, address_of(ids), address_of(rows))
    return rows


@cache
def _compiled(kind: str) -> Any:
    """Return ``rows(n, dim, key, scale, ids, rows)``."""
    element = _uniform if kind == "uniform" else _normal
    function, build = begun("rows", [INT, INT, INT, FLOAT, INTS, FLOATS], disjoint=True)
    n, dim, key, scale, ids, rows = function.args
    with build.counted(const(0), n) as i:
        begin = mixed(build, build.xor(build.load_at(ids, i), key))
        row = build.gep(rows, [build.mul(i, dim)])
        with build.counted(const(0), dim) as j:
            build.store_at(row, j, element(build, begin, j, scale))
    build.ret_void()
    (code,) = compiled(function)
    return code


def _word(build: Builder, begin: ir.Value, place: ir.Value) -> ir.Value:
    """Build the random word of a row at a place."""
    step = build.mul(build.add(place, const(1)), const(GOLDEN))
    return mixed(build, build.add(begin, step))


def _uniform(build: Builder, begin: ir.Value, j: ir.Value, scale: ir.Value) -> ir.Value:
    top = build.uitofp(build.lshr(_word(build, begin, j), const(40)), FLOAT)
    centred = build.fsub(build.fmul(top, ir.Constant(FLOAT, 2.0**-23)), ir.Constant(FLOAT, 1))
    return build.fmul(centred, scale)


def _normal(build: Builder, begin: ir.Value, j: ir.Value, scale: ir.Value) -> ir.Value:
    total, first = const(-(12 * (2**16 - 1) // 2)), build.mul(j, const(3))
    for word in range(3):
        random = _word(build, begin, build.add(first, const(word)))
        for shift in (0, 16, 32, 48):
            part = build.and_(build.lshr(random, const(shift)), const(2**16 - 1))
            total = build.add(total, part)
    return build.fmul(build.sitofp(total, FLOAT), scale)
