"""A job in training, over links to all ps: the first one leads."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from zmqtrain.actors.joining import Admission
from zmqtrain.actors.link import Link
from zmqtrain.actors.task import JobActor
from zmqtrain.chief.copies import save_copies
from zmqtrain.chief.saving import Saver
from zmqtrain.config.cluster import Role
from zmqtrain.errors import CheckpointError, ConfigError, FencedError, PeerLostError, ZmqTrainError
from zmqtrain.exchanges.lanes import map_segment
from zmqtrain.exchanges.reads import read_variables
from zmqtrain.exchanges.rows import ShardRows
from zmqtrain.models.rows import TableReader, kept, readers_of
from zmqtrain.models.tables import RowsOf
from zmqtrain.observe.outcome import STOPPED_BY
from zmqtrain.protocol.checkpoint import Saved
from zmqtrain.protocol.status import Status, TableStatuses, TaskStatus, of_all_shards
from zmqtrain.store.segment import Reached
from zmqtrain.wire import control
from zmqtrain.wire.messages import Leave, Parameters, Read

KEPT_NBYTES = 1 << 28
"""Bytes of tables, at most, of which the rows are kept after a run: of the first that fit."""

SHUTDOWN_S = 2.0  # how long a ps may take to confirm the end

log = logging.getLogger(__name__)


class LinkedJob:
    """The tasks that train the chief's job, reached over its links to all ps.

    A request to a ps raises FencedError if the ps was restarted.
    """

    def __init__(self, chief: JobActor) -> None:
        self.links: list[Link] = []  # of the chief, to all ps; once there are some
        self.tasks: tuple[TaskStatus, ...] = ()  # of the last status
        self.learned_until = 0
        self.stop_reason = f"{STOPPED_BY}a signal"
        self._chief, self._timing = chief, chief.timing
        self._segments: list[Reached | None] = []  # of the ps on this host
        self._rows: ShardRows | None = None  # once it has begun, if there are tables
        self.saver = Saver(
            chief.job,
            chief.plan.layouts,
            chief.fingerprint,
            chief.metrics,
            self.write_shards,
            lambda path, failure: self.leader.send(control.SaveEnded(path, failure)),
        )

    @property
    def leader(self) -> Link:
        return self.links[0]

    @property
    def generation(self) -> int:
        return self._chief.generation

    @property
    def stopped(self) -> tuple[int, str]:
        return self._chief.stop_code, self.stop_reason

    async def begin(self, joined: Sequence[Admission], *, again: bool) -> None:
        """Take over a running job, else restore its newest checkpoint, else initialise it.

        ``joined``: the welcomes of all ps. ``again``: some ps has lost its parameters. If the
        others hold copies, the checkpoint is one of these. Before the first checkpoint of a logdir
        the job begins once more; without a logdir it ends, as nothing would ever be saved.
        """
        near = [await map_segment(self._chief, shard, one) for shard, one in enumerate(joined)]
        self._segments = [each and each.segment for each in near]
        if tables := self._chief.job.table_variables():
            readers = [each and each.rows for each in near]
            self._rows = ShardRows(tables, self.links, readers, self._chief.plan.copies)
        generations = [one.generation for one in joined]
        lost = [
            one.link.peer
            for one in joined
            if one.generation < max(generations) or not one.generation
        ]
        if not lost and not await self.saver.has_later(generations[0]):
            self._chief.generation = self.learned_until = generations[0]
            log.info("taking over in generation %d", self.generation)
            return
        begun = [one.link for one in joined if one.generation]
        is_back = bool(lost) and (again or any(await self._versions(begun)))  # updates are lost
        text = f"{' and '.join(lost)} restarted without parameters"
        if is_back and begun and self._chief.plan.hands_over:
            is_back = not await save_copies(self._chief, text, joined)
        path, self.learned_until, generation = await self.saver.newest()
        if is_back:
            if self._chief.job.logdir is None:
                raise CheckpointError(
                    f"{text}, and there is no checkpoint to restore; give the job a logdir "
                    "(--logdir DIR)"
                )
            log.warning("%s: restoring %s", text, path or "the beginning: nothing was saved yet")
        await self._initialize(path, max(*generations, generation, self.generation) + 1)

    async def _initialize(self, path: Path | None, generation: int) -> None:
        """Begin a generation from a checkpoint; None: from the seed."""
        self._chief.generation = generation
        await self.saver.note_generation(generation)
        async with self.saver.shared_directory() as logdir:
            message = control.Initialize(str(path) if path is not None else None, logdir)
            await asyncio.gather(
                *(link.request(message, reason="it is initialising") for link in self.links)
            )

    async def begin_with(self, weights: Mapping[str, Any]) -> None:
        """Begin a new generation with these variables, from a checkpoint that holds them.

        Raises:
            ConfigError: there is no directory that all ps share.
            CheckpointError: the checkpoint cannot be written.
        """
        job, generation = self._chief.job, self.generation + 1
        if job.logdir is None and None in self._segments:
            raise ConfigError(
                "a callback sets weights between epochs, and some ps has no memory that the chief "
                "maps (it is on another host, or the lane is tcp); expected a directory in which "
                "all ps find them: give the job a logdir"
            )
        weights = {**weights, **job.frozen()}  # every task has these already
        async with self.saver.with_weights(weights, generation) as path:
            await self._initialize(path, generation)

    async def status(self, seen: int = 0, wait_s: float = 0.0) -> Status:
        """Return the status, at the latest after ``wait_s``, earlier if an event is new."""
        reply = await self.leader.request(
            control.GetStatus(seen, wait_s), reason="it has not reported the status"
        )
        status = reply.expect(Status)
        self.tasks = status.tasks
        return status

    progress = status

    def check(self, status: Status) -> None:
        """
        Raises:
            FencedError: some ps was restarted.
            PeerLostError, RefusedError: it was given up.
        """
        for link in self.links:
            link.check()
        if not status.initialised:
            raise FencedError(f"{self.leader.peer} was restarted")

    def idle_workers(self) -> list[int]:
        """Return the workers that may measure the parameters, while these stand still."""
        return [
            task.index
            for task in self.tasks
            if task.role == Role.WORKER and task.state not in ("left", "silent", "joining")
        ]

    async def keep(self, version: int, done: int) -> list[int]:
        """Have every ps keep this version for an evaluation; return those that they are at.

        ``done``: those up to this one are not read any more.
        """
        keep = control.Keep(version, self._chief.job.evaluate_average, done)
        requests = (link.request(keep, reason="it keeps a version") for link in self.links)
        return [reply.expect(Parameters).version for reply in await asyncio.gather(*requests)]

    async def read_parameters(self, average: bool = False, at: int = 0) -> dict[str, Any]:
        """Return the current variables or their moving averages.

        ``at``: those of this version, which every ps has kept.
        """
        values, _ = await read_variables(
            self._chief.plan, self.links, self._segments, average=average, at=at
        )
        return values

    def tables(self, at: int = 0) -> dict[str, TableReader]:
        """Return readers of the current rows of the job's tables.

        ``at``: of those of this version, which every ps has kept.
        """
        tables, source = self._chief.job.table_variables(), self._rows
        if tables and at:
            nowhere = [None] * len(self.links)
            source = ShardRows(tables, self.links, nowhere, self._chief.plan.copies, at)
        return readers_of(tables, source)

    async def keep_tables(self) -> dict[str, TableReader]:
        tables, source = self._chief.job.table_variables(), self._rows
        sized = [(t, 4 * t.rows * t.dim) for t in tables if t.rows is not None]
        sums = accumulate(nbytes for _, nbytes in sized)
        small = [t for (t, _), total in zip(sized, sums, strict=True) if total <= KEPT_NBYTES]
        if source is None or not small:
            return {}
        ids = [np.arange(table.rows or 0) for table in small]
        wanted = [(table.number, each) for table, each in zip(small, ids, strict=True)]
        found = await asyncio.to_thread(source.read, wanted)
        every = zip(small, ids, found, strict=True)
        return kept(tables, [RowsOf(table.number, ids, rows) for table, ids, rows in every])

    async def write_shards(self, directory: Path) -> Saved:
        reply = await self.leader.request(
            control.Save(str(directory)), reason="the shards are writing a checkpoint"
        )
        return reply.expect(Saved)

    async def set_learning_rate(self, rate: float | None) -> None:
        await self.leader.request(control.SetRate(rate), reason="it sets the learning rate")

    async def extend(self, limit: int, epoch_batches: int) -> None:
        extend = control.Extend(limit, epoch_batches)
        await self.leader.request(extend, reason="the next epoch begins")

    async def close(self, exit_code: int, reason: str) -> None:
        """Let the workers finish their steps, so that the checkpoint holds all that was learned.

        After a time limit the job goes on without slow workers: their last gradients are lost.
        """
        for at_once, share in ((False, 3 / 8), (True, 1 / 8)):
            limit_s = share * self._timing.grace_s
            try:
                await self.leader.request(
                    control.Close(at_once, int(exit_code), reason),
                    reason="workers finish their steps",
                    timeout_s=limit_s,
                )
                return
            except PeerLostError:
                log.warning("the workers did not finish their steps within %.2g s", limit_s)

    async def settle(self, *, unannounced: bool = False) -> None:
        """Wait until every shard has applied the last update, if it can.

        ``unannounced``: wait a heartbeat for parts of pushes that the leader does not know of,
        which may be under way between two epochs if the policy is not coordinated.

        The update may be queued, and a restarted ps may still have to join the leader. If a worker
        died during its push, some shards may never receive it.
        """
        patience_s = self._timing.heartbeat_s if unannounced else 0.0
        status, until = await self.status(), time.monotonic() + patience_s
        while True:
            was_delivered = status.all_delivered
            versions = await self._versions(self.links)
            status = await self.status()  # a step may have been made since
            if min(versions) >= status.step:
                return
            if was_delivered and status.all_delivered and time.monotonic() >= until:
                text = "the shards end at versions %s, not all at step %d"
                log.warning(text, versions, status.step)
                return
            await asyncio.sleep(0.01)

    async def _versions(self, links: Sequence[Link]) -> list[int]:
        """Return how many updates each of these ps has applied."""
        return [shown.version for shown in await self._shown(links)]

    async def _shown(self, links: Sequence[Link]) -> list[Parameters]:
        replies = [
            await link.request(Read(values=False), reason="it is asked for its version")
            for link in links
        ]
        return [reply.expect(Parameters) for reply in replies]

    async def table_status(self) -> TableStatuses:
        shown = [each.tables for each in await self._shown(self.links)]
        return of_all_shards(shown, self._chief.plan.copies)

    def leave(self) -> None:
        """Let the next chief take over."""
        for link in self.links:
            if link.joined:
                link.send(Leave("an engine told it to leave"))

    async def shut_down(self, code: int, reason: str, summary: str) -> None:
        """Send all tasks the end of the job."""
        message = control.Shutdown(int(code), reason, summary)
        results = await asyncio.gather(
            *(
                link.request(message, reason="it has not confirmed the end", timeout_s=SHUTDOWN_S)
                for link in self.links
            ),
            return_exceptions=True,
        )
        for result in results:
            if isinstance(result, ZmqTrainError):
                log.warning("%s", result)
            elif isinstance(result, BaseException):
                log.error("a ps was not told of the end: %s", result, exc_info=result)
