"""How the remaining workers of a group save its state, if its parts have copies.

The lowest worker has each of them carry out the last orders that any of them knows, and write a
part of a checkpoint. The next group then loses no step; if this fails, it goes on from the previous
checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from zmqtrain.actors.actor import Request
from zmqtrain.actors.task import JobActor
from zmqtrain.chief.saving import Saver
from zmqtrain.config.cluster import Role, Task
from zmqtrain.coordination.hand_over import agreed
from zmqtrain.errors import CheckpointError
from zmqtrain.planning.plan import Plan
from zmqtrain.protocol.checkpoint import LastOrders, Saved, ShardFile
from zmqtrain.server.orphaned_shard import HandingOver, OrphanedShard
from zmqtrain.server.peer_handlers import within
from zmqtrain.wire.messages import HandedOver, HandOver

log = logging.getLogger(__name__)


class Succession:
    """One worker's side of it. ``remains``: the shard that it hosted, None if nothing is left."""

    def __init__(
        self,
        actor: JobActor,
        plan: Plan,
        remains: OrphanedShard | None,
        fingerprint: Mapping[str, str],
    ) -> None:
        """``actor``: has the links to the others. ``plan``: that of the lost group."""
        self._actor, self._plan, self._hosts = actor, plan, plan.hosts
        self._fingerprint = fingerprint
        self._known: dict[int, LastOrders] = {}  # by worker
        self._own = HandingOver(plan, plan.shard_of(actor.task), remains, self._beside)
        self._writing = asyncio.Lock()
        self._directory = ""  # the one that this worker has others write into
        self._answers: dict[int, HandedOver] = {}  # theirs, by worker
        self._is_answered = asyncio.Event()

    @property
    def last(self) -> LastOrders | None:
        return self._own.last

    def note(self, worker: int, last: LastOrders | None) -> None:
        if last is not None:
            self._known[worker] = last

    async def save(self, workers: Collection[int]) -> None:
        """Save what these workers hold together; if they cannot, log the reason."""
        actor = self._actor
        if self._plan.copies == 1:
            return
        self.note(actor.task.index, self.last)
        known = {worker: last for worker, last in self._known.items() if worker in workers}
        left = {shard: known[host] for shard, host in enumerate(self._hosts) if host in known}
        names = [str(Task(Role.WORKER, host)) for host in self._hosts]
        try:
            last, saved, layouts = agreed(self._plan.layouts, left, names)
            write = partial(self._collect, tuple(layouts), last, saved)
            saver = Saver(actor.job, [*layouts.values()], self._fingerprint, actor.metrics, write)
            await saver.save(saved.step, last.generation)
            log.warning("the job goes on at step %d, without a step lost", saved.step)
        except CheckpointError as error:
            log.warning("the job goes on from the last checkpoint: %s", error)

    async def _collect(
        self, shards: tuple[int, ...], last: LastOrders, saved: Saved, directory: Path
    ) -> Saved:
        """Have the hosts of these shards write themselves into a directory."""
        actor, message = self._actor, HandOver(directory.name, shards, last)
        hosts = [self._hosts[shard] for shard in shards]
        self._directory, self._answers = directory.name, {}
        until = time.monotonic() + actor.timing.peer_timeout_s
        while missing := [host for host in hosts if host not in self._answers]:
            if time.monotonic() > until:
                raise CheckpointError(f"worker {missing[0]} has not written its part in time")
            if actor.task.index in missing:
                self._own.take(message, partial(self.take, actor.task.index))
            names = {str(Task(Role.WORKER, host)) for host in missing}
            for link in actor.links:
                if link.peer in names:
                    link.send(message)
            self._is_answered.clear()
            await within(actor.timing.heartbeat_s, self._is_answered)
        return replace(saved, files=tuple(map(self._file, hosts)))

    def _file(self, host: int) -> ShardFile:
        answer = self._answers[host]
        if answer.file is None:
            raise CheckpointError(f"worker {host}: {answer.reason}")
        return answer.file

    def take(self, worker: int, answer: HandedOver) -> None:
        if answer.directory == self._directory:
            self._answers[worker] = answer
            self._is_answered.set()

    def on_hand_over(self, request: Request, message: HandOver) -> None:
        self._own.take(message, request.send)

    def _beside(self, work: Callable[[], HandedOver], then: Callable[[HandedOver], None]) -> None:
        async def write() -> None:
            async with self._writing:
                answer = await asyncio.to_thread(work)
            then(answer)

        self._actor.spawn(write())
