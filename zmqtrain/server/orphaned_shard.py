"""A shard whose generation is over because another one is lost, and how it is handed over."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from zmqtrain.coordination.hand_over import lacking, left_of
from zmqtrain.errors import CheckpointError, ZmqTrainError
from zmqtrain.planning.plan import Plan
from zmqtrain.protocol.checkpoint import LastOrders, ShardFile
from zmqtrain.protocol.orders import Accumulate, Apply, Numbered, Reduce
from zmqtrain.store import checkpoint
from zmqtrain.store.layout import ShardLayout
from zmqtrain.store.shard import Shard
from zmqtrain.wire.messages import HandedOver, HandOver

Reply = Callable[[HandedOver], None]


class OrphanedShard:
    """A shard whose orders have ended, until it is handed over.

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


class HandingOver:
    """Writes a shard's part of a checkpoint once for each request, and answers repeated ones."""

    def __init__(
        self,
        plan: Plan,
        shard: int | None,
        remains: OrphanedShard | None,
        run: Callable[[Callable[[], HandedOver], Callable[[Any], None]], None],
    ) -> None:
        """``shard``: its number in this plan; it and ``remains`` are None if nothing is left.

        ``run`` calls two functions, beside the event loop and then on it, and in order.
        """
        self._plan, self._shard, self._remains, self._run = plan, shard, remains, run
        self._asked = ""  # the directory to write into
        self._answer: HandedOver | None = None  # once that is done

    @property
    def last(self) -> LastOrders | None:
        """The last orders that are known to the shard."""
        return self._remains.last if self._remains is not None else None

    def take(self, message: HandOver, reply: Reply) -> None:
        """Write the part, and answer; a repeated request is answered again."""
        if message.directory != self._asked:
            self._asked, self._answer = message.directory, None
            self._run(partial(self._written, message), partial(self._done, reply))
        elif self._answer is not None:
            reply(self._answer)

    def _done(self, reply: Reply, answer: HandedOver) -> None:
        if answer.directory == self._asked:
            self._answer = answer
        reply(answer)

    def _written(self, message: HandOver) -> HandedOver:
        try:
            return HandedOver(message.directory, self._write(message))
        except ZmqTrainError as error:
            return HandedOver(message.directory, None, str(error))

    def _write(self, message: HandOver) -> ShardFile:
        layouts, own = left_of(self._plan.layouts, message.shards), self._shard
        if self._remains is None or own is None or layouts is None or own not in layouts:
            raise CheckpointError("nothing is left of its part")
        # The name alone is the peer's: the rest of the path is that of this task's logdir.
        root = checkpoint.checkpoints_directory(Path(self._plan.job.logdir or ""))
        directory = root / Path(message.directory).name
        return self._remains.write(directory, layouts[own], message.last)
