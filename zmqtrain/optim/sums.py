"""Sums of gradients, with the same bits on a CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np

from zmqtrain.compute.arrays import Flat
from zmqtrain.models.backend import is_on_gpu


def add_up(
    terms: Sequence[Flat],
    weights: Sequence[float],
    out: Flat,
    *,
    factor: float = 1,
    limit: float = inf,
) -> None:
    """Set ``out`` to the :func:`zmqtrain.optim.formula.total` of the terms, without warnings.

    ``terms``: at least one, all of shape (n,) like ``out``, which may be the first of them.
    """
    if is_on_gpu(out):
        from zmqtrain.optim.kernels import gpu

        gpu.add_up(terms, weights, factor, limit, out)
        return
    with np.errstate(all="ignore"):
        pairs = zip(terms, weights, strict=True)
        first, *others = (term if w == 1 else term * np.float32(w) for term, w in pairs)
        if others:
            np.add(first, others[0], out=out)
        else:
            out[...] = first
        for term in others[1:]:
            out += term
        if factor != 1:
            out *= np.float32(factor)
        if limit != inf:
            np.clip(out, -limit, limit, out=out)
