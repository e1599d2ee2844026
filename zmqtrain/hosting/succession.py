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
from zmqtrain.coordination.hand_over import left_of, newest
from zmqtrain.errors import CheckpointError, ZmqTrainError
from zmqtrain.planning.plan import Plan
from zmqtrain.protocol.checkpoint import LastOrders, Saved, ShardFile
from zmqtrain.server.orphaned_shard import OrphanedShard
from zmqtrain.server.peer_handlers import within
from zmqtrain.store.checkpoint import checkpoints_directory
from zmqtrain.wire.messages import HandedOver, HandOver

log = logging.getLogger(__name__)

Reply = Callable[[HandedOver], None]


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
        self._actor, self._plan, self._remains = actor, plan, remains
        self._hosts = plan.hosts
        self._fingerprint = fingerprint
        self._layouts = plan.layouts
        self._known: dict[int, LastOrders] = {}  # by worker
        self._asked = ""  # the directory that this worker is to write into
        self._answer: HandedOver | None = None  # once it has
        self._writing = asyncio.Lock()
        self._directory = ""  # the one that this worker has others write into
        self._answers: dict[int, HandedOver] = {}  # theirs, by worker
        self._is_answered = asyncio.Event()

    @property
    def last(self) -> LastOrders | None:
        return self._remains.last if self._remains is not None else None

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
        last = newest(known.values())
        try:
            if last is None or last.saved is None:
                raise CheckpointError("none of the workers that are left knows the last orders")
            left = {worker for worker, each in known.items() if each.generation == last.generation}
            shards = [number for number, host in enumerate(self._hosts) if host in left]
            layouts = left_of(self._layouts, shards)
            if layouts is None:
                names = ", ".join(f"worker {host}" for host in self._hosts if host not in left)
                raise CheckpointError(f"parts are lost with all of their copies, on {names}")
            write = partial(self._collect, tuple(shards), last, last.saved)
            saver = Saver(actor.job, [*layouts.values()], self._fingerprint, actor.metrics, write)
            await saver.save(last.saved.step, last.generation)
            log.warning("the job goes on at step %d, without a step lost", last.saved.step)
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
                self._hand_over(message, partial(self.take, actor.task.index))
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
        self._hand_over(message, request.send)

    def _hand_over(self, message: HandOver, reply: Reply) -> None:
        """Write this worker's part once, and answer; a repeated request is answered again."""
        if message.directory != self._asked:
            self._asked, self._answer = message.directory, None
            self._actor.spawn(self._write(message, reply))
        elif self._answer is not None:
            reply(self._answer)

    async def _write(self, message: HandOver, reply: Reply) -> None:
        file, reason = None, ""
        async with self._writing:
            try:
                file = await asyncio.to_thread(self._written, message)
            except ZmqTrainError as error:
                reason = str(error)
        answer = HandedOver(message.directory, file, reason)
        if message.directory == self._asked:
            self._answer = answer
        reply(answer)

    def _written(self, message: HandOver) -> ShardFile:
        worker, layouts = self._actor.task.index, left_of(self._layouts, message.shards)
        own = self._hosts.index(worker) if worker in self._hosts else -1
        if self._remains is None or layouts is None or own not in layouts:
            raise CheckpointError("nothing is left of its part")
        # The name alone is the peer's: the rest of the path is that of this worker's logdir.
        root = checkpoints_directory(Path(self._actor.job.logdir or ""))
        directory = root / Path(message.directory).name
        return self._remains.write(directory, layouts[own], message.last)
