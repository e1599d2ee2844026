"""A shard whose generation is over, since another one is lost."""

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
from zmqtrain.server.work_queue import WorkQueue
from zmqtrain.store import checkpoint
from zmqtrain.store.layout import ShardLayout
from zmqtrain.store.shard import Shard
from zmqtrain.wire.control import HandedOver, HandOver

GONE = "too little is left of its part; the job can only go on from its last checkpoint"
"""Why a host cannot write a part of a group's state."""

Reply = Callable[[HandedOver], None]


class OrphanedShard:
    """A shard that its ps changes no more until it is handed over; ``last``: its last orders."""

    def __init__(
        self, shard: Shard, last: LastOrders, done: int, own: Iterable[Numbered] = ()
    ) -> None:
        """``done``: the last order carried out. ``own``: unfinished ones of the leader's shard."""
        self.last = last
        self._shard, self._done, self._own = shard, done, tuple(own)
        self._answers: dict[str, HandedOver | None] = {}  # by directory; None: not written yet

    def close(self) -> None:
        self._shard.segment.remove()

    def hand_over(self, message: HandOver, plan: Plan, work: WorkQueue, reply: Reply) -> None:
        """Write its part once, as ``work``, and answer; a repeated request is answered again."""
        if message.directory not in self._answers:
            self._answers[message.directory] = None
            write = partial(self._written, message, plan)
            work.put(write, partial(self._answer, reply), rare=True, lasting=True)
            work.run()
        elif (answer := self._answers[message.directory]) is not None:
            reply(answer)

    def _answer(self, reply: Reply, answer: Any) -> None:
        self._answers[answer.directory] = answer
        reply(answer)

    def _written(self, message: HandOver, plan: Plan) -> HandedOver:
        # The name alone is the peer's: the rest of the path is that of this task's logdir.
        root = checkpoint.checkpoints_directory(Path(plan.job.logdir or ""))
        directory = root / Path(message.directory).name
        layouts, own = left_of(plan.layouts, message.shards), self._shard.layout.shard
        try:
            if layouts is None or own not in layouts:
                raise CheckpointError(GONE)
            return HandedOver(message.directory, self.write(directory, layouts[own], message.last))
        except ZmqTrainError as error:
            return HandedOver(message.directory, None, f"worker {plan.hosts[own]}: {error}")

    def write(self, directory: Path, layout: ShardLayout, last: LastOrders) -> ShardFile:
        """Carry out the last orders, then write the layout's part of a checkpoint.

        Raises:
            ZmqTrainError: it lacks more than these orders, or the disk failed.
        """
        self._level(last)
        copy = self._shard.write(directory, layout)
        return checkpoint.seal_shard(copy, layout.shard, self._shard.version)

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
