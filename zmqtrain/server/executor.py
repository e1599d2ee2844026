"""How a ps carries out orders: one after another on its shard, then the answer to the worker."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from zmqtrain.actors.actor import Request
from zmqtrain.actors.callbacks import guarded
from zmqtrain.actors.work_queue import WorkQueue
from zmqtrain.config.cluster import Role
from zmqtrain.coordination.membership import Peer
from zmqtrain.errors import ConfigError, ZmqTrainError
from zmqtrain.server.direction import Pending
from zmqtrain.server.recovery import packed_release
from zmqtrain.store import checkpoint, segment_layout
from zmqtrain.wire.messages import Order, Release, ShardFile

if TYPE_CHECKING:
    from zmqtrain.server.server import ParameterServer

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Applied:
    """One update that was applied."""

    version: int  # after it
    gradients: int  # averaged in it
    contributions: list[Pending]  # those of workers that are still there
    seconds: float  # that it took
    at: float  # of the monotonic clock


class Executor:
    """The orders of one ps under way."""

    def __init__(self, ps: ParameterServer) -> None:
        self._ps = ps
        self._work = WorkQueue(str(ps.task), on_error=ps.crash)
        self._uncounted: deque[Applied] = deque()
        self._count = guarded(self.count, ps.crash)

    def after_orders(self, call: Callable[[], None]) -> None:
        """Call once everything ordered so far is done; the shard is at rest then."""
        self._work.add(call)

    def close(self) -> None:
        self._work.close()

    def carry_out(self, orders: Iterable[tuple[int, Order]]) -> None:
        """Queue numbered orders; each is done before the next is begun.

        The segment keeps the number of the last one done. 0: this shard ordered it by itself.
        """
        for number, order in orders:
            match order.kind:
                case "apply" | "reduce":
                    self._update(number, order)
                case "accumulate":
                    worker = order.workers[0]
                    work = partial(self._ps.shard.accumulate, worker, number)
                    self._work.add(partial(self._accumulated, worker), work)
                case "drop":
                    self._then(number, self._dropped, order)
                case "release":
                    self._then(number, self._release, order)
                case "snapshot":
                    self._snapshot(order.text)
                    self._then(number, self._nothing, order)
                case "switch":
                    self._then(number, self._switch, order)
                case "leave":
                    self._then(number, self._nothing, order)

    def _then(self, number: int, call: Callable[[Order], None], order: Order) -> None:
        self._work.add(partial(self._done, number, call, order))

    def _done(self, number: int, call: Callable[[Order], None], order: Order) -> None:
        call(order)
        if number:
            self._ps.shard.segment.words[segment_layout.ORDERS] = number

    def _nothing(self, order: Order) -> None:
        """It was the coordinator's affair, or is done elsewhere."""

    def _update(self, number: int, order: Order) -> None:
        started = 0.0
        failure: ConfigError | None = None

        def work() -> None:
            nonlocal started, failure
            started = time.perf_counter()
            try:
                if order.kind == "apply":
                    self._ps.shard.apply(order.workers[0], number)
                else:
                    self._ps.shard.reduce(order.workers, number)
            except ConfigError as error:  # a schedule gave no rate; the parameters are untouched
                failure = error

        def then() -> None:
            if failure is not None:
                self._not_applied(order.workers, failure)
                self._done(number, self._nothing, order)
                return
            self._applied(order.workers, time.perf_counter() - started)

        self._work.add(then, work)

    def _applied(self, workers: tuple[int, ...], seconds: float) -> None:
        """Note what gradients became one update; counting it has time until they are answered."""
        contributions = []
        for worker in workers:
            pending = self._ps.pending.get(worker)
            if pending is not None and pending.sequence:
                pending.result = "applied"
                self._ps.marks.settle(worker, pending.sequence, "applied")
                contributions.append(pending)
        if not self._uncounted:
            asyncio.get_running_loop().call_soon(self._count)
        applied = Applied(
            self._ps.shard.version, len(workers), contributions, seconds, time.monotonic()
        )
        self._uncounted.append(applied)

    def count(self) -> None:
        """Count the updates of late in the metrics and in the figures of the run."""
        metrics = self._ps.metrics
        while self._uncounted:
            applied = self._uncounted.popleft()
            metrics.apply_duration_seconds.observe(applied.seconds)
            metrics.pushes.applied.inc(applied.gradients)
            metrics.parameter_version.set(applied.version)
            for pending in applied.contributions:
                stale = max(0, applied.version - 1 - pending.version)
                metrics.staleness_versions.observe(stale)
            self._ps.direction.applied(applied)

    def _not_applied(self, workers: tuple[int, ...], error: ConfigError) -> None:
        for worker in workers:
            pending = self._ps.pending.get(worker)
            if pending is not None:
                pending.result, pending.reason = "dropped", str(error)
                self._ps.marks.settle(worker, pending.sequence, "dropped")
        self._ps.direction.cannot_update(error)

    def _accumulated(self, worker: int) -> None:
        self._ps.metrics.pushes.accumulated.inc()
        pending = self._ps.pending.get(worker)
        if pending is not None:
            pending.result = "accumulated"
            self._ps.marks.settle(worker, pending.sequence, "accumulated")

    def _dropped(self, order: Order) -> None:
        self._ps.metrics.pushes.dropped.inc()
        pending = self._ps.pending.get(order.workers[0])
        if pending is not None:
            pending.result, pending.reason = "dropped", order.text
            self._ps.marks.settle(order.workers[0], pending.sequence, "dropped")

    def _release(self, order: Order) -> None:
        worker = order.workers[0]
        pending = self._ps.pending.get(worker)
        peer = self._ps.peers.get(Role.WORKER, worker)
        if peer is None or peer.incarnation != order.incarnation:
            return
        if pending is not None and pending.sequence != order.sequence:
            return
        if pending is None or not pending.result:
            # It has not come yet; or it came after a switch, and was decided on before.
            peer.released = order.sequence
            self._ps.marks.release(worker, order.sequence)
            if pending is not None:
                self._ps.direction.arrived(worker, pending)
            return
        del self._ps.pending[worker]
        release = Release(
            pending.sequence,
            pending.result,
            self._ps.shard.version,
            order.batches,
            order.stop,
            pending.reason,
            time.monotonic() - pending.arrived_at,
        )
        peer.answered, peer.last_release = pending.sequence, release
        self._ps.marks.answer(worker, pending.sequence, packed_release(release))
        if pending.request is not None:  # else the worker will ask again
            self.send_release(pending.request, peer, release)

    def send_release(self, request: Request, peer: Peer, release: Release) -> None:
        """Answer a push; what it says of the parameters is true until the next order.

        Who is to stop needs none, and on a slow link they would keep the end of the run back.
        """
        if peer.lane != "tcp" or release.stop:
            request.reply(release)
            return
        flat = self._ps.shard.parameters
        request.reply_with(release, flat.copy() if self._ps.job.consistent_reads else flat)

    def _switch(self, order: Order) -> None:
        self._ps.direction.switched(order.text)
        log.info("the policy is %s from version %d on", order.text, self._ps.shard.version)

    def _snapshot(self, directory: str) -> None:
        """Copy the shard into a file, before the next order, and make it durable beside them."""
        file: Path | None = None
        failure: ZmqTrainError | None = None

        def work() -> None:
            nonlocal file, failure
            shard = self._ps.shard
            try:
                file = checkpoint.copy_shard(
                    Path(directory), shard.layout, shard.parameters, shard.slots
                )
            except ZmqTrainError as error:
                failure = error

        def then() -> None:
            if file is not None:
                self._ps.spawn(self._seal(file, self._ps.shard.version))
            elif failure is not None:
                self._not_written(directory, failure)

        self._work.add(then, work, rare=True)

    async def _seal(self, file: Path, version: int) -> None:
        shard = self._ps.shard.layout.shard
        try:
            written = await asyncio.to_thread(checkpoint.seal_shard, file, shard, version)
        except ZmqTrainError as error:
            self._not_written(str(file.parent), error)
        else:
            self._ps.direction.written(str(file.parent), ShardFile(*astuple(written)))

    def _not_written(self, directory: str, error: ZmqTrainError) -> None:
        self._ps.metrics.checkpoint_failures.write.inc()
        self._ps.direction.not_written(directory, error)
