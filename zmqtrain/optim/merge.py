"""The weighted sum of gradients that have some rows each."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from zmqtrain.models.tables import Ids, Places, Rows
from zmqtrain.optim.kernels.cpu import address_of
from zmqtrain.optim.kernels.llvm import FLOAT, FLOATS, INT, INTS, begun, compiled, const


class Term(NamedTuple):
    """Rows of a gradient by sorted unique ids, its weight, and known places of rows, or -1."""

    ids: Ids
    rows: Rows
    weight: float
    places: Places


def merged(terms: Sequence[Term], count: int) -> tuple[Ids, Rows, Places]:
    """Return the sum of terms in their order, each times its weight, by sorted unique ids, and the
    known places of its rows.

    ``count``: how many gradients are added up, some of which may have none of these rows. A row is
    zero in a gradient that does not have it, so the bits are those of the same sum of dense
    gradients (see optim/pipeline.py).
    """
    if len(terms) == 1:
        ids, rows, weight, places = terms[0]
        total = rows if weight == 1 else rows * np.float32(weight)
        return ids, total if count == 1 else total + np.float32(0), places
    every = np.sort(np.concatenate([term.ids for term in terms]), kind="stable")
    firsts = np.flatnonzero(np.diff(every, prepend=~every[:1]))
    ids, dim = every[firsts], terms[0].rows.shape[1]
    is_in_all = np.diff(firsts, append=len(every)) == count
    total = np.empty((len(ids), dim), np.float32)
    total[...] = np.where(is_in_all, np.float32(-0.0), np.float32(0))[:, None]  # x + -0.0 is x
    add, places = _compiled(), np.full(len(ids), -1)
    whole = address_of(ids), address_of(total), address_of(places)
    for given in terms:
        rows = np.ascontiguousarray(given.rows)
        own = address_of(given.ids), address_of(rows), address_of(given.places)
        add(len(given.ids), dim, given.weight, *own, *whole)
    return ids, total, places


@cache
def _compiled() -> Any:
    """Return ``add(n, dim, weight, ids, rows, places, all_ids, total, all_places)``, which adds
    rows to those with their ids, and sets the places of these: all ids are sorted."""
    function, build = begun("add", [INT, INT, FLOAT, INTS, FLOATS, INTS, INTS, FLOATS, INTS])
    n, dim, weight, ids, rows, places, all_ids, total, all_places = function.args
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
        build.store_at(all_places, place, build.load_at(places, i))
        source = build.gep(rows, [build.mul(i, dim)])
        target = build.gep(total, [build.mul(place, dim)])
        with build.counted(const(0), dim) as j:
            term = build.fmul(build.load_at(source, j), weight)
            build.store_at(target, j, build.fadd(build.load_at(target, j), term))
    build.ret_void()
    (code,) = compiled(function)
    return code
