"""The weighted sum of gradients that have some rows each."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

from zmqtrain.models.tables import Ids, Rows
from zmqtrain.optim.kernels.cpu import address_of
from zmqtrain.optim.kernels.loop import counted, engine_of

_INT, _FLOAT = ir.IntType(64), ir.FloatType()


class Term(NamedTuple):
    """Rows of a gradient by sorted unique ids, and its weight."""

    ids: Ids
    rows: Rows
    weight: float = 1.0


def merged(terms: Sequence[Term], count: int) -> tuple[Ids, Rows]:
    """Return the sum of terms in their order, each times its weight, by sorted unique ids.

    ``count``: how many gradients are added up, some of which may have none of these rows. A row is
    zero in a gradient that does not have it, so the bits are those of the same sum of dense
    gradients (see optim/pipeline.py).
    """
    if len(terms) == 1:
        ids, rows, weight = terms[0]
        total = rows if weight == 1 else rows * np.float32(weight)
        return ids, total if count == 1 else total + np.float32(0)
    every = np.sort(np.concatenate([term.ids for term in terms]), kind="stable")
    firsts = np.flatnonzero(np.diff(every, prepend=~every[:1]))
    ids, dim = every[firsts], terms[0].rows.shape[1]
    is_in_all = np.diff(firsts, append=len(every)) == count
    total = np.empty((len(ids), dim), np.float32)
    total[...] = np.where(is_in_all, np.float32(-0.0), np.float32(0))[:, None]  # x + -0.0 is x
    add, _ = _compiled()
    for given in terms:
        rows = np.ascontiguousarray(given.rows)
        own = address_of(given.ids), address_of(rows)
        add(len(given.ids), dim, given.weight, *own, address_of(ids), address_of(total))
    return ids, total


@cache
def _compiled() -> tuple[Callable[..., None], Any]:
    """Return ``add(n, dim, weight, ids, rows, all_ids, total)``, and the owner of its code."""
    function = _function()
    _, engine = engine_of(function.module)
    place = ctypes.c_void_p
    types = ctypes.c_int64, ctypes.c_int64, ctypes.c_float, place, place, place, place
    return ctypes.CFUNCTYPE(None, *types)(engine.get_function_address(function.name)), engine


def _function() -> ir.Function:
    """Return the function that adds rows to those with their ids: all ids are sorted."""
    ints, floats = _INT.as_pointer(), _FLOAT.as_pointer()
    types = _INT, _INT, _FLOAT, ints, floats, ints, floats
    function = ir.Function(ir.Module(), ir.FunctionType(ir.VoidType(), types), "add")
    n, dim, weight, ids, rows, all_ids, total = function.args
    rows.add_attribute("noalias")
    total.add_attribute("noalias")
    build = ir.IRBuilder(function.append_basic_block())
    zero, one, at = ir.Constant(_INT, 0), ir.Constant(_INT, 1), build.alloca(_INT)
    build.store(zero, at)
    with counted(build, zero, n, 1) as i:
        id_ = build.load(build.gep(ids, [i]))
        seek, found = (function.append_basic_block(name) for name in ("seek", "found"))
        build.branch(seek)
        build.position_at_end(seek)
        place = build.load(at)
        build.store(build.add(place, one), at)
        build.cbranch(
            build.icmp_signed("==", build.load(build.gep(all_ids, [place])), id_), found, seek
        )
        build.position_at_end(found)
        source = build.gep(rows, [build.mul(i, dim)])
        target = build.gep(total, [build.mul(place, dim)])
        with counted(build, zero, dim, 1) as j:
            element = build.gep(target, [j])
            term = build.fmul(build.load(build.gep(source, [j])), weight)
            build.store(build.fadd(build.load(element), term), element)
    build.ret_void()
    return function
