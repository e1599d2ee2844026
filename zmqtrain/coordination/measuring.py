"""Updates that wait for the norm of their mean, of which each shard knows a part. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from zmqtrain.coordination.events import Measured
from zmqtrain.protocol.orders import Apply, Measure, Order, Reduce


@dataclass
class Measuring:
    """Holds an update back, with all later orders, until all shards have measured its mean."""

    shards: int  # that measure means; 0: no update is held back
    number: int = 0  # of the last Measure
    held: list[Order] = field(default_factory=list)
    squares: dict[int, int] = field(default_factory=dict)  # of the first one, by shard

    def passed(self, orders: Iterable[Order]) -> list[Order]:
        """Return the orders that can be given now, behind those that were held back."""
        was_holding, going = bool(self.held), list[Order]()
        self.held += orders
        while self.held and not self._waits(self.held[0]):
            going.append(self.held.pop(0))
        if self.held and (going or not was_holding) and isinstance(self.held[0], Apply | Reduce):
            self.number += 1
            going.append(Measure(self.held[0], self.number))
        return going

    def lacks(self, event: Measured) -> bool:
        """Return whether an update waits for this square; a report may be repeated."""
        is_awaited = bool(self.held) and event.number == self.number
        return is_awaited and event.shard not in self.squares

    def measured(self, event: Measured) -> list[Order]:
        """Return the orders that can be given once the event has happened."""
        if not self.lacks(event):
            return []
        self.squares[event.shard] = event.square
        if len(self.squares) < self.shards:
            return []
        total, self.squares = float(sum(self.squares.values())), {}
        if isinstance(update := self.held[0], Apply | Reduce):
            self.held[0] = replace(update, square=total)
        return self.passed(())

    def _waits(self, order: Order) -> bool:
        if isinstance(order, Reduce) and order.local_steps:
            return False
        return self.shards > 0 and isinstance(order, Apply | Reduce) and order.square is None
