"""The hand-over of parameters that have copies, after some ps are lost. Pure.

Every ps of a generation has carried out the same orders, except for the last few. The remaining ps
become equal by the last orders that one of them knows, and together they hold all parts unless a
part is lost with all of its copies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from zmqtrain.errors import CheckpointError
from zmqtrain.planning.plan import Plan
from zmqtrain.protocol.checkpoint import LastOrders, Saved
from zmqtrain.protocol.orders import Numbered, Order
from zmqtrain.store.layout import ShardLayout
from zmqtrain.store.placement import nearest


class OrderLog:
    """The last orders of a ps, including all that another ps may lack.

    A worker goes on once every ps has answered it, so a ps lacks at most one update of each worker.
    """

    def __init__(self, workers: int) -> None:
        self._orders: deque[Order] = deque(maxlen=16 + 4 * (workers + 1))
        self._end = 0  # number of the last one
        self.last: LastOrders | None = None
        """The last orders whose outcome is known."""

    def begin(self) -> None:
        """Begin a generation, whose orders are numbered from 1."""
        self._orders.clear()
        self._end, self.last = 0, None

    def take(
        self, generation: int, number: int, orders: Sequence[Order], saved: Saved | None
    ) -> None:
        """Add orders, the first of which has this number.

        ``saved``: the content of a checkpoint after them; None: known only with later ones.
        """
        if number != self._end + 1:  # orders before these are unknown
            self._orders.clear()
        self._orders.extend(orders)
        self._end = number + len(orders) - 1
        if saved is not None:
            first = self._end - len(self._orders) + 1
            self.last = LastOrders(generation, first, tuple(self._orders), saved)


def agreed(
    plan: Plan, known: Mapping[int, LastOrders]
) -> tuple[LastOrders, Saved, dict[int, ShardLayout]]:
    """Return the latest orders with a known outcome, this outcome, and the layout of each writer.

    ``known``: the last orders of each shard that is left.

    Raises:
        CheckpointError: the outcome is not known, or parts of it are lost.
    """
    told = [last for last in known.values() if last.saved is not None]
    last = max(told, key=lambda last: (last.generation, last.end), default=None)
    if last is None or last.saved is None:
        raise CheckpointError("no remaining ps knows the last orders")
    left = [shard for shard, each in sorted(known.items()) if each.generation == last.generation]
    parts = left_of(plan.layouts, left)
    if parts is None:
        lost = ", ".join(f"worker {host}" for at, host in enumerate(plan.hosts) if at not in left)
        raise CheckpointError(f"parts are lost with all of their copies, on {lost}")
    return last, last.saved, parts


def lacking(last: LastOrders, generation: int, done: int) -> list[Numbered]:
    """Return the orders after ``done``, the last one that a ps has carried out.

    Raises:
        CheckpointError: it is of another generation, or lacks more than these orders.
    """
    if generation != last.generation or not last.number - 1 <= done <= last.end:
        raise CheckpointError(
            f"it has carried out order {done} of generation {generation}; expected one of "
            f"{last.number - 1} to {last.end} of generation {last.generation}"
        )
    return [*enumerate(last.orders, last.number)][done + 1 - last.number :]


def left_of(
    layouts: Sequence[ShardLayout], shards: Collection[int]
) -> dict[int, ShardLayout] | None:
    """Return new layouts of these shards if no other is left; None: a part is lost.

    Such a layout, with a new number, has as copies all parts that the shard must not write.
    """
    seen = nearest(layouts, shards)
    lost = (layout for layout in seen if layout.shard not in shards)
    if not all(part.copy for layout in lost for part in layout.parts):
        return None
    left = [layout for layout in seen if layout.shard in shards]
    return {layout.shard: replace(layout, shard=n) for n, layout in enumerate(left)}
