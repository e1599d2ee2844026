"""The weighted sum of gradients that have some rows each."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from zmqtrain.models.tables import Ids, Rows
from zmqtrain.optim.kernels.cpu import address_of
from zmqtrain.optim.kernels.llvm import FLOAT, FLOATS, INT, INTS, begun, compiled, const


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
    add = _compiled()
    for given in terms:
        rows = np.ascontiguousarray(given.rows)
        own = address_of(given.ids), address_of(rows)
        add(len(given.ids), dim, given.weight, *own, address_of(ids), address_of(total))
    return ids, total


@cache
def _compiled() -> Any:
    """Return ``add(n, dim, weight, ids, rows, all_ids, total)``, which adds rows to those with
    their ids: all ids are sorted."""
    function, build = begun("add", [INT, INT, FLOAT, INTS, FLOATS, INTS, FLOATS])
    n, dim, weight, ids, rows, all_ids, total = function.args
    rows.add_attribute("noalias")
    total.add_attribute("noalias")
    at = build.alloca(INT)
    build.store(const(0), at)
    with build.counted(const(0), n) as i:
        id_ = build.load_at(ids, i)
        seek, found = (function.append_basic_block(name) for name in ("seek", "found"))
        build.branch(seek)
        build.position_at_end(seek)
        place = build.load(at)
        build.raised(at, const(1))
        build.cbranch(build.icmp_signed("==", build.load_at(all_ids, place), id_), found, seek)
        build.position_at_end(found)
        source = build.gep(rows, [build.mul(i, dim)])
        target = build.gep(total, [build.mul(place, dim)])
        with build.counted(const(0), dim) as j:
            term = build.fmul(build.load_at(source, j), weight)
            build.store_at(target, j, build.fadd(build.load_at(target, j), term))
    build.ret_void()
    (code,) = compiled(function)
    return code
