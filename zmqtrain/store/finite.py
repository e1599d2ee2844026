"""Whether a gradient may be applied."""

from __future__ import annotations

from functools import partial
from math import isfinite
from typing import Any

import numpy as np

from zmqtrain.compute.arrays import block_size, blocks
from zmqtrain.compute.threads import ThreadTeam
from zmqtrain.store.segment_layout import cut

LARGE = 1 << 22
"""Elements from which a team pays off, 16 MiB: a check is three times as fast as an update."""


def all_finite(flat: Any, team: ThreadTeam | None = None) -> bool:
    """Return whether all elements are finite, in one pass at the speed of the memory.

    ``flat``: array of shape (n,), on any device. ``team``: shares the work, on the CPU.
    """
    if team is None or len(flat) < LARGE or not isinstance(flat, np.ndarray):
        return _all_finite(flat)
    found: list[bool] = []

    def look(part: slice) -> None:
        found.append(_all_finite(flat[part]))

    team.run([partial(look, part) for part in cut(len(flat))])
    return all(found)


def _all_finite(flat: Any) -> bool:
    """Say the same, alone.

    The dot product with itself is finite unless an element is not, or squares overflow; only then
    are elements checked, block by block up to the first bad one.
    """
    if isfinite(np.vdot(flat, flat)):  # unlike dot, it does not warn of an overflow
        return True
    return all(np.isfinite(flat[block]).all() for block in blocks(len(flat), block_size(flat)))
