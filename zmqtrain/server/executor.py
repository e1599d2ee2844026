"""Carries out a ps's orders, one after another on its shard, and answers the workers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from zmqtrain.actors.actor import Request, guarded
from zmqtrain.actors.task import JobActor
from zmqtrain.coordination.events import Measured
from zmqtrain.errors import ConfigError, SegmentError, ZmqTrainError
from zmqtrain.protocol.orders import (
    Accumulate,
    Answer,
    Apply,
    Drop,
    Measure,
    Numbered,
    Order,
    Rate,
    Reduce,
    Roster,
    Snapshot,
    Switch,
)
from zmqtrain.server.differences import Differences
from zmqtrain.server.state import ShardState, WorkerRecord
from zmqtrain.server.work_queue import Result, WorkQueue
from zmqtrain.store import checkpoint
from zmqtrain.store.table_memory import Kept
from zmqtrain.wire.compression import make_compression
from zmqtrain.wire.control import Keep, ShardWritten
from zmqtrain.wire.messages import Pull, PullReply, Push, PushReply

log = logging.getLogger(__name__)

_WITH_PARAMETERS = Pull, Push  # a tuple: isinstance is twice as fast with it


@dataclass(slots=True)
class Applied:
    """One update was made; its workers may have been answered already."""

    version: int  # after it
    gradients: int  # averaged in it
    staleness: dict[int, int]  # of these in versions, by present worker
    seconds: float  # its duration
    at: float  # of the monotonic clock
    is_round: bool = False  # of local steps


@dataclass(slots=True)
class Refused:
    """The update cannot be made; the parameters are unchanged."""

    error: ConfigError | SegmentError


@dataclass(slots=True)
class Early:
    """A worker may go on after a push that is not decided here yet."""

    worker: WorkerRecord


OrderOutcome: TypeAlias = Applied | Refused | Early | Measured | Switch | Roster | ShardWritten
"""The outcome of an order. A switch and a roster have been carried out."""


class Executor:
    """Carries out the orders of one ps, and reports their outcomes."""

    def __init__(
        self, actor: JobActor, state: ShardState, report: Callable[[OrderOutcome], None]
    ) -> None:
        self._state = state
        self._metrics, self._traces = actor.metrics, actor.traces
        self._report = report
        self._spawn = actor.spawn
        self._copies_sent = actor.job.consistent_reads  # updates continue while they are sent
        self._sends_last = actor.job.inner_state == "keep"
        made = make_compression(actor.job.compression) if actor.job.encodes_answers else None
        # None: answers after local steps are sent as they are.
        self._differences = None if made is None else Differences(state.shard, made)
        self.work = WorkQueue(str(state.task), on_error=actor.crash)
        self._uncounted: deque[Applied] = deque()
        self._count = guarded(self.count, actor.crash)
        self._halts = False
        self._is_over = False  # further orders of this generation are dropped
        self._policy = ""  # the last one in the log
        self._next = 0  # the version to be kept, 0: none
        self._average = False  # whether its moving average is kept in its place
        self._kept: list[Kept] = []  # two with tables: one is read while the next is made

    def halt_at_snapshot(self) -> None:
        """Carry out no order after the next lasting snapshot, since its result would be lost.

        A halted executor continues up to the next snapshot.
        """
        self._halts = True
        self.resume()

    def resume(self) -> None:
        """Carry out the orders after the snapshot of a halted executor, too."""
        self.work.paused = False
        self.work.run()

    @property
    def halted(self) -> bool:
        return self.work.paused

    def after_orders(self, call: Callable[[], None]) -> None:
        """Call once all orders so far are done and the shard is idle."""
        self.work.put(None, lambda _: call(), lasting=True)
        self.work.run()

    def beside_orders(
        self, read: Callable[[], Result], then: Callable[[Result | ZmqTrainError | None], None]
    ) -> None:
        """Read beside the event loop, once all orders so far are done and the shard is idle."""
        self.work.put(read, then, rare=True, lasting=True)
        self.work.run()

    def forget_orders(self, *, further: bool = False) -> None:
        """Drop the unfinished orders: their generation is over. ``further``: later ones, too."""
        self.work.forget()
        self._is_over = further
        if self._differences is not None:
            self._differences.forget()

    def keep(self, keep: Keep) -> None:
        """Keep a version that is still to come, and give up those that are not read any more."""
        self._kept = [each for each in self._kept if each.version > keep.done]
        if not keep.version or keep.version > self._state.version:
            self._next, self._average = keep.version, keep.average

    def forget_kept(self) -> None:
        self._next, self._kept = 0, []

    def kept(self, version: int) -> Kept | None:
        """Return what was kept of this version, None if it was not."""
        return next((each for each in self._kept if each.version == version), None)

    def close(self) -> None:
        self.work.close()

    def carry_out(self, orders: Iterable[Numbered]) -> None:
        """Carry out numbered orders; each is done before the next is begun.

        The segment keeps the number of the last one done. 0: this shard ordered it by itself.
        """
        if self._is_over:
            return
        shard, put, keep_changed = self._state.shard, self.work.put, self._state.keep_changed
        for number, order in orders:
            match order:
                case Apply() | Reduce() | Accumulate():
                    put(None, keep_changed)
                    change = partial(self._carry_out_of(order), order, number)
                    put(change, partial(self._changed, number, order))
                case Measure(update, measure):
                    square = partial(shard.square_of, update)
                    put(square, partial(self._measured, measure))
                case Snapshot(directory):
                    copy = partial(_copy, directory, self._state)
                    put(copy, partial(self._copied, number, directory), rare=True)
                case Roster() if shard.tables is not None:
                    put(shard.keep_frozen, partial(self._go_on, number, order), rare=True)
                case _:
                    put(None, partial(self._go_on, number, order))
        self.work.run()

    def _carry_out_of(self, order: Order) -> Callable[[Order, int], object]:
        """Return a function that carries out a change, and encodes its difference if it travels."""
        differences, workers = self._differences, self._state.workers
        if differences is not None and isinstance(order, Reduce) and order.local_steps:
            given = [workers[index].pushed for index in order.workers if index in workers]
            if any(push is not None and push.wants_parameters for push in given):
                return differences.carry_out
        return self._state.shard.carry_out

    def _go_on(self, number: int, order: Order, _: object) -> None:
        """Carry out an order that changes no parameters."""
        match order:
            case Answer():
                worker = self._state.workers.get(order.worker)
                if worker is not None and worker.incarnation == order.incarnation:
                    self._answer(worker, order)
            case Drop(worker=index, reason=reason):
                self._metrics.pushes.dropped.inc()
                self._state.decided(index, "dropped", reason)
            case Rate():
                self._state.shard.carry_out(order)
            case Switch():
                self._report(order)
                if order.policy != self._policy:  # a pass renews the same one
                    self._policy = order.policy
                    text = "the policy is %s from version %d on"
                    log.info(text, self._policy, self._state.version)
            case Roster():
                self._report(order)
        self._done(number)

    def _measured(self, measure: int, square: Any) -> None:
        """Report it; until its update is made, a restarted ps is to measure again."""
        self._report(Measured(self._state.shard.layout.shard, measure, square))

    def _done(self, number: int) -> None:
        """Note that an order is carried out; updates and sums do so themselves."""
        if number:
            self._state.orders = number

    def _changed(self, number: int, order: Apply | Reduce | Accumulate, outcome: object) -> None:
        """Note the outcome for gradients; updates are counted after their workers are answered."""
        if outcome == "applied":
            steps = 0 if isinstance(order, Accumulate) else order.local_steps
            self._updated(order.workers, steps)
        elif outcome == "accumulated":
            self._metrics.pushes.accumulated.inc()
            self._state.decided(order.workers[0], "accumulated")
        elif isinstance(outcome, ConfigError | SegmentError) and not self._state.shard.is_changing:
            # A schedule gave no rate, or more rows have no room; nothing was changed.
            for worker in order.workers:
                self._state.decided(worker, "dropped", str(outcome))
            self._report(Refused(outcome))
            self._done(number)
        elif isinstance(outcome, Exception):
            raise outcome  # half of the change is made, and the next life of this ps finishes it
        else:
            raise TypeError(f"an update returned {outcome!r}")

    def _updated(self, workers: tuple[int, ...], steps: int) -> None:
        version, staleness = self._state.version, {}
        if self._next == version:
            keep = partial(self._state.shard.keep, average=self._average)
            self.work.put(keep, self._has_kept, rare=True, first=True)
        for worker in workers:
            if self._traces is not None:
                self._traces.applied(worker, time.monotonic(), self.work.last_s)
            if push := self._state.decided(worker, "applied"):
                staleness[worker] = max(0, version - (steps or 1) - push.version)
        if not self._uncounted:
            asyncio.get_running_loop().call_soon(self._count)
        self._uncounted.append(
            Applied(version, len(workers), staleness, self.work.last_s, time.monotonic(), steps > 0)
        )

    def count(self) -> None:
        """Count the updates since the last call in the metrics, and report them."""
        metrics = self._metrics
        while self._uncounted:
            applied = self._uncounted.popleft()
            metrics.apply_duration_seconds.observe(applied.seconds)
            metrics.pushes.applied.inc(applied.gradients)
            metrics.parameter_version.set(applied.version)
            for versions in applied.staleness.values():
                metrics.staleness_versions.observe(versions)
            self._report(applied)

    def _answer(self, worker: WorkerRecord, order: Answer) -> None:
        state, pending = self._state, worker.pending
        if pending is not None and pending.sequence != order.sequence:
            return
        if pending is None or not pending.is_decided:
            # It has not come yet, or it came after a switch and was decided on before.
            worker.early = order
            state.keep(worker)
            if pending is not None:
                self._report(Early(worker))
            return
        worker.pending = None
        reply = worker.reply = pending.reply(order, state.version, state.shard.learning_rate)
        state.keep(worker)  # before the answer: the next push may follow at once
        if pending.request is not None:  # else the worker will ask again
            self.send_parameters(pending.request, reply)
        if self._traces is not None:
            push = worker.index, worker.incarnation, pending.sequence
            self._traces.answered(push, pending.arrived_at, time.monotonic(), pending.result or "")
        lookups, worker.lookups = worker.lookups, {}
        for send_rows in lookups.values():
            send_rows()

    def send_parameters(self, request: Request, reply: PullReply | PushReply) -> None:
        """Answer a request; the parameters are those until the next order.

        A stopped worker needs none, unless it keeps a state that belongs to them; on a slow link
        they would delay the end of the run.
        """
        asked = request.envelope.message
        wants = isinstance(asked, _WITH_PARAMETERS) and asked.wants_parameters
        if not wants or (reply.stop and not self._sends_last):
            request.reply(reply)
            return
        shard = self._state.shard
        flat = shard.parameters[shard.layout.owned]
        if self._differences and isinstance(asked, Push) and isinstance(reply, PushReply):
            if (encode := self._differences.since(asked.version)) is not None:
                request.reply_with(replace(reply, is_difference=True), flat, encode)
                return
        request.reply_with(reply, flat.copy() if self._copies_sent else flat)

    def _has_kept(self, kept: Any) -> None:
        self._kept = [*(self._kept[:1] if kept.rows is not None else ()), kept]

    def _copied(self, number: int, directory: str, copy: object) -> None:
        """Finish the copy of the shard in a file, beside the next orders."""
        if isinstance(copy, checkpoint.ShardCopy):
            self._spawn(self._seal(copy, self._state.version))
            self.work.paused = self._halts and not checkpoint.is_temporary(copy.path.parent)
        elif isinstance(copy, ZmqTrainError):
            self._not_written(directory, copy)
        self._done(number)

    async def _seal(self, copy: checkpoint.ShardCopy, version: int) -> None:
        shard, directory = self._state.shard.layout.shard, str(copy.path.parent)
        try:
            written = await asyncio.to_thread(checkpoint.seal_shard, copy, shard, version)
        except ZmqTrainError as error:
            self._not_written(directory, error)
        else:
            self._report(ShardWritten(directory, written))

    def _not_written(self, directory: str, error: ZmqTrainError) -> None:
        self._metrics.checkpoint_failures.write.inc()
        log.error("this shard's part of the checkpoint was not written: %s", error)
        self._report(ShardWritten(directory, None, f"{self._state.task}: {error}"))


def _copy(directory: str, state: ShardState) -> checkpoint.ShardCopy:
    """Copy the shard, which is at rest, into a file."""
    return state.shard.write(checkpoint.attempt_of(directory))
