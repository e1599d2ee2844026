"""A shard whose ps has ended with its group of workers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from zmqtrain.coordination.hand_over import lacking
from zmqtrain.errors import CheckpointError
from zmqtrain.protocol.checkpoint import LastOrders, ShardFile
from zmqtrain.protocol.orders import Accumulate, Apply, Numbered, Reduce
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
        """``done``: number of the last order carried out.

        ``own``: unfinished orders, with the numbers of the leader's own shard.
        """
        self.last = last
        self._shard, self._done, self._own = shard, done, tuple(own)

    def close(self) -> None:
        self._shard.segment.remove()

    def write(self, directory: Path, layout: ShardLayout, last: LastOrders) -> ShardFile:
        """Carry out the last orders, then write the layout's part of a checkpoint.

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
            needed = order.workers if isinstance(order, Apply | Accumulate | Reduce) else ()
            if missing := [worker for worker in needed if self._shard.staged(worker) is None]:
                raise CheckpointError(
                    f"order {number} needs a gradient of worker {missing[0]}; it has none"
                )
            self._shard.carry_out(order, number)
        step = last.saved.step if last.saved is not None else -1
        if self._shard.version != step:
            raise CheckpointError(
                f"after order {last.end} this part is at version {self._shard.version}; expected "
                f"version {step}"
            )
