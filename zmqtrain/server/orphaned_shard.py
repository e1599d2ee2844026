"""A shard whose ps is gone with its group of workers, and the last orders that the ps knew."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from zmqtrain.coordination.hand_over import lacking
from zmqtrain.errors import CheckpointError
from zmqtrain.protocol.checkpoint import LastOrders, ShardFile
from zmqtrain.protocol.orders import Accumulate, Apply, Numbered, Order, Reduce
from zmqtrain.store import checkpoint
from zmqtrain.store.layout import ShardLayout
from zmqtrain.store.shard import Shard


class OrphanedShard:
    """A shard whose memory outlives its ps, until it is handed over.

    ``last``: the last orders that the ps knew.
    """

    def __init__(
        self, shard: Shard, last: LastOrders, done: int, own: Iterable[Numbered] = ()
    ) -> None:
        """``done``: number of the last order carried out. ``own``: some that are yet to be, which
        the shard counts by itself, as where the leader is.
        """
        self.last = last
        self._shard, self._done, self._own = shard, done, tuple(own)

    def close(self) -> None:
        self._shard.segment.remove()

    def write(self, directory: Path, layout: ShardLayout, last: LastOrders) -> ShardFile:
        """Carry out the last orders, then write into a checkpoint what the layout is to write.

        Raises:
            ZmqTrainError: it lacks more than these orders, or the disk failed.
        """
        self._level(last)
        file = self._shard.write(directory, layout)
        return checkpoint.seal_shard(file, layout.shard, self._shard.version)

    def _level(self, last: LastOrders) -> None:
        orders = [*self._own, *lacking(last, self.last.generation, self._done)]
        self.last, self._done, self._own = last, last.end, ()
        for number, order in orders:
            carry_out(self._shard, number, order)
        step = last.saved.step if last.saved is not None else -1
        if self._shard.version != step:
            raise CheckpointError(
                f"after order {last.end} this part is at version {self._shard.version}; expected "
                f"version {step}"
            )


def carry_out(shard: Shard, number: int, order: Order) -> None:
    """Carry out an order as far as it changes the shard: nobody waits for an answer any more.

    Raises:
        CheckpointError: it is about a gradient that is not there.
    """
    needed = order.workers if isinstance(order, Apply | Accumulate | Reduce) else ()
    for worker in needed:
        if shard.staged(worker) is None:
            raise CheckpointError(
                f"order {number} needs a gradient of worker {worker}; it has none"
            )
    shard.carry_out(order, number)
