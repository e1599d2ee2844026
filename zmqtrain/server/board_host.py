"""A ps's part in a roster: it opens the board, finishes work of dead members, and ends it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from functools import reduce
from typing import NamedTuple

from zmqtrain.actors.waits import Waits, within
from zmqtrain.coordination.events import Stepped
from zmqtrain.errors import PeerLostError
from zmqtrain.metrics.sums import added
from zmqtrain.protocol.orders import Roster
from zmqtrain.server.state import ShardState
from zmqtrain.store import words
from zmqtrain.store.board import Board, Holder

LOOK_S = 0.05  # time between two checks whether all members live
SOON_S = 0.002  # the same while a roster ends
NOBODY = Holder(-1, 0, -1)


class _Stuck(NamedTuple):
    """A member that has left in the middle of its update while its process lives."""

    peer: str
    wait: int  # token of the ps's wait for it
    until: float  # monotonic seconds


class BoardHost:
    """Opens the board for the leader's rosters, and reports their progress.

    The leader closes the board once the roster is reported as over.
    """

    def __init__(self, state: ShardState, waits: Waits, patience_s: float) -> None:
        """``waits``: those of the ps. ``patience_s``: time for a member that left in its update."""
        self._state = state
        self._board = Board(state.shard.segment)
        self._waits = waits
        self._patience_s = patience_s
        self._unopened: list[int | None] = []  # halts of a roster that is not open yet
        self._ends = asyncio.Event()  # the roster ends
        self._reported = 0  # steps of this roster in the last report
        self._stuck: _Stuck | None = None

    def reaches(self, index: int) -> bool:
        """Return whether a worker has mapped the shard, and its writes there outlive it."""
        worker, shard = self._state.workers.get(index), self._state.shard
        survives = shard.safe or shard.segment.path is None
        is_mapped = worker is not None and worker.lane in ("memory", "shm")
        return is_mapped and survives and words.are_there()

    @property
    def made(self) -> int:
        """Reported steps of the roster in force, which the shard's version does not include."""
        return self._reported if self._board.in_force else 0

    def begin(self, roster: Roster) -> Stepped | None:
        """Put a roster in force, before its members are released."""
        lives = [self._state.workers.get(index) for index in roster.workers]
        holders = [
            NOBODY if life is None else Holder(life.index, life.incarnation, life.buffer)
            for life in lives
        ]
        self._board.open(self._state.version, roster.steps, roster.next_batch, holders)
        self._reported = 0
        self._ends.clear()
        halts, self._unopened = self._unopened, []
        for worker in halts:
            self._take(worker)
        return self.report() if halts else None

    def recover(self, *, is_over: bool) -> None:
        """Continue a killed ps's roster; ``is_over``: the leader knows that it is over."""
        if is_over:
            self.close()
        elif any(map(self._board.is_taken, range(len(self._board.holders)))):
            self._ends.set()

    def close(self) -> None:
        if self._board.in_force:
            self._board.close()

    def halt(self, worker: int | None = None) -> Stepped | None:
        """End the roster with the step under way, or only take the seat of ``worker``.

        If a worker has died with its gradient ready, the step under way counts it.
        """
        if not self._board.in_force:
            self._unopened.append(worker)
            return None
        self._take(worker)
        return self.report()

    def _take(self, worker: int | None) -> None:
        for place, holder in enumerate(self._board.holders):
            if worker in (None, holder.worker):
                self._board.take(place)
        self._ends.set()

    def report(self) -> Stepped | None:
        """Return the roster's progress if it has changed or is over."""
        board = self._board
        if not board.in_force:
            return None
        self._finish_for_those_that_left()
        over = board.is_over
        steps = board.made if over else board.sealed
        if steps == self._reported and not over:
            return None
        self._reported = steps
        figures = {
            holder.worker: board.figures(place, steps) for place, holder in enumerate(board.holders)
        }
        examples = sum(each.examples for each in figures.values())
        loss = sum(each.loss for each in figures.values())
        weight = sum(each.weight for each in figures.values())
        losses = {worker: each.last for worker, each in figures.items()}
        sums = reduce(added, [dict(each.sums) for each in figures.values()])
        return Stepped(steps, examples, loss, over, sums, losses if steps else {}, weight)

    async def watch(self) -> AsyncIterator[Stepped | None]:
        """Yield the progress of rosters that end; None: a member seems to have died.

        Raises:
            PeerLostError: a member that has left, but lives, does not end its update.
        """
        while self._board.in_force:
            if await within(LOOK_S, self._ends):
                await asyncio.sleep(SOON_S)
                if (stepped := self.report()) is not None:
                    yield stepped
            elif self._lacks_a_member():
                yield None
            if self._stuck is not None and time.monotonic() > self._stuck.until:
                raise PeerLostError(
                    f"{self._stuck.peer} has been in the middle of an update for "
                    f"{self._patience_s:g} s and nobody else can finish that: it is stopped; end "
                    "or continue its process, and start the job again"
                )

    def _lacks_a_member(self) -> bool:
        segment, board = self._state.shard.segment, self._board
        holders = enumerate(board.holders)
        here = [holder.buffer for place, holder in holders if not board.is_taken(place)]
        return segment.path is not None and not all(map(segment.is_held, here))

    def _finish_for_those_that_left(self) -> None:
        """Finish their part of a step for which all gradients are ready."""
        board, shard, stuck = self._board, self._state.shard, ""
        for place, holder in enumerate(board.holders):
            life = self._state.workers.get(holder.worker)
            is_here = life is not None and life.incarnation == holder.incarnation
            if not is_here and board.lacks(place):
                is_dead = not shard.segment.is_held(holder.buffer)
                if not board.finish(place, shard, is_dead=is_dead):
                    stuck = f"worker {holder.worker}"
        if self._stuck is not None and self._stuck.peer != stuck:
            self._waits.end(self._stuck.wait)
            self._stuck = None
        if stuck and self._stuck is None:
            reason = "it has left, but lives, in the middle of an update that nobody else can end"
            wait = self._waits.begin(stuck, reason, self._patience_s)
            self._stuck = _Stuck(stuck, wait, time.monotonic() + self._patience_s)
