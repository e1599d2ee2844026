"""The share of a shard that each member of a board updates: dense blocks, and whole tables.

A table has one owner in a roster, so one task changes its rows and its index, in a workspace of its
own. The number of rows of a step is unknown: a table counts as one row an example of a batch.

Once all gradients are ready, a step cannot be refused. So there is room for the new rows of the
next step before it begins; a member whose gradient may need more pushes it by messages.
"""

from __future__ import annotations

from collections.abc import Sequence

from zmqtrain.store.changes import Change
from zmqtrain.store.shard import Shard
from zmqtrain.store.table_layout import WORKSPACES


def owned(sizes: Sequence[int], members: int) -> list[range]:
    """Return which of the parts of these sizes each member updates: equal shares, in order."""
    total, before, last = max(sum(sizes), 1), 0, 0
    bounds = [0] * (members + 1)
    for part, size in enumerate(sizes, 1):
        middle = min((2 * before + size) * members // (2 * total), members - 1)
        last = max(last, middle)
        bounds[last + 1] = part
        before += size
    for member in range(members):
        bounds[member + 1] = max(bounds[member + 1], bounds[member])
    return [range(*bounds[member : member + 2]) for member in range(members)]


class BoardShare:
    """The share of the member in one place. Each step is begun, then made, or repaired and made."""

    def __init__(self, shard: Shard, place: int, members: int) -> None:
        self._dense, parts = shard.dense, shard.segment.layout.parts
        sizes = [part.where.stop - part.where.start for part in parts]
        of_tables = [] if shard.tables is None else shard.tables.sizes(shard.batch_size)
        members = min(members, WORKSPACES)
        own = owned([*sizes, *of_tables], members)[place] if place < members else range(0)
        count = len(parts)
        self._parts = range(min(own.start, count), min(own.stop, count))
        numbers = range(max(own.start - count, 0), max(own.stop - count, 0))
        self._tables = None
        if shard.tables is not None and numbers:
            self._tables = shard.tables.beside(place, numbers, members)

    def begin(self) -> None:
        """Note that nothing of a step is made."""
        self._dense.begin_parts(self._parts)
        if self._tables is not None:
            self._tables.begin_own()

    def repair(self) -> None:
        """Repair the memory that a killed owner of this share may have left."""
        if self._tables is not None:
            self._tables.repair_stores()

    def update(self, change: Change) -> None:
        """Make a step, or finish it."""
        self._dense.update_parts(self._parts, change)
        if self._tables is not None:
            self._tables.repair(change)
            self._tables.update(change)
