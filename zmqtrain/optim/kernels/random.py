"""Initial rows of tables, compiled by LLVM: those of models/tables.py, bit for bit."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir

from zmqtrain.models.tables import Ids, Initial, Normal, Rows, Uniform
from zmqtrain.optim.kernels.cpu import address_of
from zmqtrain.optim.kernels.loop import counted, engine_of

GOLDEN = 0x9E3779B97F4A7C15

_INT, _FLOAT = ir.IntType(64), ir.FloatType()


def mixed(build: ir.IRBuilder, word: ir.Value) -> ir.Value:
    """Build the finaliser of SplitMix64: see ``mixed`` in models/tables.py."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        word = build.xor(word, build.lshr(word, _number(shift)))
        word = build.mul(word, _number(factor))
    return build.xor(word, build.lshr(word, _number(31)))


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
    function, _ = _compiled(kind)
    function(len(ids), dim, key, scale, address_of(ids), address_of(rows))
    return rows


@cache
def _compiled(kind: str) -> tuple[Callable[..., None], Any]:
    """Return the code, and its owner."""
    function = _function(_uniform if kind == "uniform" else _normal)
    _, engine = engine_of(function.module)
    number, place = ctypes.c_int64, ctypes.c_void_p
    types = number, number, ctypes.c_uint64, ctypes.c_float, place, place
    return ctypes.CFUNCTYPE(None, *types)(engine.get_function_address(function.name)), engine


def _function(element: Callable[[ir.IRBuilder, ir.Value, ir.Value, ir.Value], Any]) -> ir.Function:
    ints, floats = _INT.as_pointer(), _FLOAT.as_pointer()
    types = _INT, _INT, _INT, _FLOAT, ints, floats
    function = ir.Function(ir.Module(), ir.FunctionType(ir.VoidType(), types), "rows")
    n, dim, key, scale, ids, rows = function.args
    rows.add_attribute("noalias")
    build = ir.IRBuilder(function.append_basic_block())
    with counted(build, _number(0), n, 1) as i:
        begin = mixed(build, build.xor(build.load(build.gep(ids, [i])), key))
        row = build.gep(rows, [build.mul(i, dim)])
        with counted(build, _number(0), dim, 1) as j:
            build.store(element(build, begin, j, scale), build.gep(row, [j]))
    build.ret_void()
    return function


def _word(build: ir.IRBuilder, begin: ir.Value, place: ir.Value) -> ir.Value:
    """Build the random word of a row at a place."""
    step = build.mul(build.add(place, _number(1)), _number(GOLDEN))
    return mixed(build, build.add(begin, step))


def _uniform(build: ir.IRBuilder, begin: ir.Value, j: ir.Value, scale: ir.Value) -> ir.Value:
    top = build.uitofp(build.lshr(_word(build, begin, j), _number(40)), _FLOAT)
    centred = build.fsub(build.fmul(top, ir.Constant(_FLOAT, 2.0**-23)), ir.Constant(_FLOAT, 1))
    return build.fmul(centred, scale)


def _normal(build: ir.IRBuilder, begin: ir.Value, j: ir.Value, scale: ir.Value) -> ir.Value:
    total, first = _number(-(12 * (2**16 - 1) // 2)), build.mul(j, _number(3))
    for word in range(3):
        random = _word(build, begin, build.add(first, _number(word)))
        for shift in (0, 16, 32, 48):
            part = build.and_(build.lshr(random, _number(shift)), _number(2**16 - 1))
            total = build.add(total, part)
    return build.fmul(build.sitofp(total, _FLOAT), scale)


def _number(value: int) -> ir.Constant:
    return ir.Constant(_INT, value)
