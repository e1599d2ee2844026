"""The exchange over the board: workers of one host make steps in its ps's memory by themselves.

At the beginning, for a checkpoint, and when a task joins, leaves or dies, the workers push by
messages. With the answer they find their seats on the board, and go on there until one is taken.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from zmqtrain.actors.link import Link
from zmqtrain.actors.task import JobActor
from zmqtrain.compute.offload import Offload
from zmqtrain.errors import ConfigError
from zmqtrain.exchanges.parameter_server import ParameterServerExchange
from zmqtrain.store.board import DONE, MADE, Board, Seat
from zmqtrain.store.holdings.tables import Tables
from zmqtrain.store.shard import Shard
from zmqtrain.training.exchange import Membership, StepReport, StepResult

LOOK_S = 50e-6  # how long a thread looks at a word again and again: others are seldom later
BLOCK_S = 0.002  # how long the loop may stand still: for a wait, or between two steps
WAIT_S = 0.1  # longest single wait of a thread: the ps may be given up between two
TURNS = 8  # turns of the event loop, for workers of one process, before a thread waits


class BoardExchange(ParameterServerExchange):
    """One worker's exchange with the board of a ps; without a seat there, it is by messages."""

    def __init__(self, actor: JobActor, links: Sequence[Link]) -> None:
        """``links``: one, to the ps."""
        super().__init__(actor, links)
        (self._link,) = links
        self._seat: Seat | None = None
        self._place: tuple[Board, Shard] | None = None  # of this membership, once it was needed
        self._updating = Offload("update")
        self._waiting = ThreadPoolExecutor(1, thread_name_prefix="wait")
        self._turned_at = 0.0
        self._awaited = -1  # the last member that this step waited for, beyond a short look

    async def join(self) -> Membership:
        self._seat = self._place = None
        membership = await super().join()
        if self.lanes[0].reached is None:
            raise ConfigError(
                f"exchange is board, but tensors travel to {self._link.peer} by tcp; expected all "
                "tasks on one host, which share its memory; use exchange direct"
            )
        self._take_seat()
        return membership

    def begin(self) -> None:
        if self._seat is None:
            super().begin()

    def written(self, names: Sequence[str]) -> None:
        if self._seat is None:
            super().written(names)

    def finish(self, report: StepReport) -> Awaitable[StepResult]:
        seat = self._seat
        if seat is None:
            return self._push(report)
        self._link.check()  # or members that never wait would go on in the memory of a lost ps
        lane = self.lanes[0]
        absent = lane.layout.numbers_of(report.absent)
        measured = report.examples, report.loss, report.sums, absent, report.weight
        if report.finite:
            if lane.row_buffer is not None:
                lane.row_buffer.write(report.rows)
            if seat.has_room(report.rows) and seat.offer(*measured):
                return self._step(seat, report)
        return self._push_after_all(report)

    def leave(self, reason: str) -> None:
        super().leave(reason)
        self._waiting.shutdown(wait=False)
        self._updating.close()

    def _push(self, report: StepReport) -> Awaitable[StepResult]:
        return self._seated(super().finish(report))

    def _push_after_all(self, report: StepReport) -> Awaitable[StepResult]:
        """The roster is over, or this push to the ps ends it."""
        self._seat = None
        self.begin()
        return self._push(report)

    async def _seated(self, answer: Awaitable[StepResult]) -> StepResult:
        result = await answer
        self._take_seat()
        return result

    def _take_seat(self) -> None:
        """Look on the board whether a roster has begun."""
        actor, reached = self._actor, self.lanes[0].reached
        if self._place is None and reached is not None:
            segment, job = reached.whole(), actor.job
            memory = self.lanes[0].rows
            shard = Shard(
                actor.plan.layouts[0],
                job.update(),
                segment,
                safe=segment.path is not None,
                batch_size=job.worker_batch_size,
                tables=None if memory is None else Tables(job.table_updates(), memory),
            )
            self._place = Board(segment), shard
        if self._place is not None:
            board, shard = self._place
            self._seat = board.seat_of(actor.task.index, actor.incarnation, shard)

    async def _step(self, seat: Seat, report: StepReport) -> StepResult:
        began_at, self._awaited = time.perf_counter(), -1
        if not await self._until(seat, MADE):
            return await self._push_after_all(report)
        all_made_at = time.perf_counter()
        await self._updating.run(seat.update)
        updated_at = time.perf_counter()
        await self._until(seat, DONE)
        batch = seat.end_step()
        self.versions[0] = seat.version
        self.copy_byte_state()
        held_s = all_made_at - began_at + await self._turn() - updated_at
        if self._awaited >= 0:
            worker = seat.holders[self._awaited].worker
            self._actor.metrics.waited_for_seconds[worker].inc(held_s)
        update_s = updated_at - all_made_at
        return StepResult("applied", (batch,), held_s=held_s, update_s=update_s)

    async def _turn(self) -> float:
        """Let the event loop have a turn if it has had none for long; return the time."""
        now = time.perf_counter()
        if now - self._turned_at > BLOCK_S:
            await asyncio.sleep(0)
            now = self._turned_at = time.perf_counter()
        return now

    async def _until(self, seat: Seat, word: int) -> bool:
        """Wait until all have raised a word; False: someone will not make a gradient ready.

        Raises:
            FencedError, PeerLostError: the ps does not know us any more, or is given up.
        """
        late, loop = await self._shortly(seat, word), asyncio.get_running_loop()
        while late >= 0 and not self._is_over(seat, word, late):
            awaited, worker = late, seat.holders[late].worker
            self._awaited = late
            with self._actor.waits.on(f"worker {worker}", self._lack(seat, word)):
                while late == awaited and not self._is_over(seat, word, late):
                    wait = partial(seat.wait, late, word, WAIT_S)
                    await loop.run_in_executor(self._waiting, wait)
                    self._link.check()
                    late = seat.missing(word)
            self._turned_at = time.perf_counter()
        return late < 0

    async def _shortly(self, seat: Seat, word: int) -> int:
        """Look for a short time; return the member whose word is missing then, or -1."""
        late = seat.missing(word)
        if seat.is_private:  # the others need this event loop
            for _ in range(TURNS):
                if late < 0:
                    break
                await asyncio.sleep(0)
                late = seat.missing(word)
            return late
        until = time.perf_counter() + LOOK_S
        while late >= 0 and time.perf_counter() < until:
            late = seat.missing(word)
        until += BLOCK_S
        while late >= 0 and not self._is_over(seat, word, late):
            left_s = until - time.perf_counter()
            if left_s <= 0:
                break
            self._awaited = late
            seat.wait(late, word, left_s)
            late = seat.missing(word)
        return late

    @staticmethod
    def _is_over(seat: Seat, word: int, late: int) -> bool:
        return word == MADE and seat.is_over(late)

    def _lack(self, seat: Seat, word: int) -> str:
        """Return what a step lacks while a member has not raised a word."""
        if word == DONE:
            return f"step {seat.version} lacks its update; if it dies, the ps finishes that"
        return (
            f"step {seat.version} lacks its gradient; if it dies, or is silent for "
            f"{self._actor.timing.lease_s:g} s, the others go on without it"
        )
