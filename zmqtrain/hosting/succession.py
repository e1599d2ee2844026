"""Saving the state of a group from its remaining workers, if its parts have copies.

The lowest worker has each of them carry out the last orders that any of them knows, and write a
part of a checkpoint. Then the next group loses no step; else it has the previous checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection
from functools import partial

from zmqtrain.actors.actor import Request
from zmqtrain.actors.task import JobActor
from zmqtrain.actors.waits import within
from zmqtrain.chief.copies import save_left
from zmqtrain.config.cluster import Role, Task
from zmqtrain.errors import CheckpointError
from zmqtrain.planning.plan import Plan
from zmqtrain.protocol.checkpoint import LastOrders
from zmqtrain.server.orphaned_shard import GONE, OrphanedShard, Reply
from zmqtrain.server.work_queue import WorkQueue
from zmqtrain.wire.control import HandedOver, HandOver

log = logging.getLogger(__name__)


class Succession:
    """One worker's side of it. ``remains``: the shard that it hosted, None if nothing is left."""

    def __init__(self, actor: JobActor, plan: Plan, remains: OrphanedShard | None) -> None:
        """``actor``: has the links to the others. ``plan``: that of the lost group."""
        self._actor, self._plan, self._remains = actor, plan, remains
        self._hosts = plan.hosts
        self._known: dict[int, LastOrders] = {}  # by shard
        self._work = WorkQueue(str(actor.task), on_error=actor.crash)
        self._directory = ""  # the one that this worker has others write into
        self._answers: dict[int, HandedOver] = {}  # theirs, by worker
        self._is_answered = asyncio.Event()

    @property
    def last(self) -> LastOrders | None:
        return self._remains.last if self._remains is not None else None

    def note(self, worker: int, last: LastOrders | None) -> None:
        if last is not None and worker in self._hosts:
            self._known[self._hosts.index(worker)] = last

    async def save(self, workers: Collection[int]) -> None:
        """Save a checkpoint from the shards of these workers; if they cannot, log the reason."""
        actor = self._actor
        if self._plan.copies == 1:
            return
        self.note(actor.task.index, self.last)
        known = {at: last for at, last in self._known.items() if self._hosts[at] in workers}
        try:
            step = await save_left(actor, self._plan, known, self._collect)
            log.warning("the job goes on at step %d, without a step lost", step)
        except CheckpointError as error:
            log.warning("the job goes on from the last checkpoint: %s", error)

    async def _collect(self, message: HandOver) -> list[HandedOver]:
        """Have the hosts of these shards write themselves into a directory."""
        actor = self._actor
        hosts = [self._hosts[shard] for shard in message.shards]
        self._directory, self._answers = message.directory, {}
        until = time.monotonic() + actor.timing.peer_timeout_s
        while missing := [host for host in hosts if host not in self._answers]:
            if time.monotonic() > until:
                raise CheckpointError(f"worker {missing[0]} has not written its part in time")
            if actor.task.index in missing:
                self._hand_over(message, partial(self.take, actor.task.index))
            names = {str(Task(Role.WORKER, host)) for host in missing}
            for link in actor.links:
                if link.peer in names:
                    link.send(message)
            self._is_answered.clear()
            await within(actor.timing.heartbeat_s, self._is_answered)
        return [self._answers[host] for host in hosts]

    def take(self, worker: int, answer: HandedOver) -> None:
        if answer.directory == self._directory:
            self._answers[worker] = answer
            self._is_answered.set()

    def on_hand_over(self, request: Request, message: HandOver) -> None:
        self._hand_over(message, request.send)

    def _hand_over(self, message: HandOver, reply: Reply) -> None:
        if self._remains is None:
            reply(HandedOver(message.directory, None, f"{self._actor.task}: {GONE}"))
        else:
            self._remains.hand_over(message, self._plan, self._work, reply)

    def close(self) -> None:
        self._work.close()
