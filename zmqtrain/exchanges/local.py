"""The local exchange: all parameters are in this process, and updates are made in place.

The same coordinator decides as with parameter servers, so one worker gets the same parameters, bit
for bit. Tests use it as the reference.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal

from zmqtrain.compute.device import Device
from zmqtrain.coordination import waiting
from zmqtrain.coordination.coordinator import Coordinator
from zmqtrain.coordination.endings import divergence
from zmqtrain.coordination.events import Event, GivenUp, Joined, PullArrived, PushArrived
from zmqtrain.coordination.ledger import Ledger
from zmqtrain.coordination.statistics import Staleness, Throughput
from zmqtrain.errors import ConfigError, ExitCode, SegmentError
from zmqtrain.job import Job
from zmqtrain.models.rows import RowSource
from zmqtrain.models.tables import Ids, Rows
from zmqtrain.models.weights import weight_of
from zmqtrain.policies import make_policy
from zmqtrain.protocol.orders import Answer, Drop, Order
from zmqtrain.store.holdings.tables import Tables
from zmqtrain.store.layout import ShardLayout
from zmqtrain.store.shard import Shard
from zmqtrain.store.table_memory import TableMemory
from zmqtrain.training.exchange import Exchange, Membership, Round, StepReport, StepResult
from zmqtrain.wire.control import Close, Extend

log = logging.getLogger(__name__)

WORKER = 0
GRADIENT = 0  # number of the gradient buffer in the segment


def own_shard(job: Job, layout: ShardLayout, device: Device | None = None) -> Shard:
    """Return a shard of all of a job, in private memory."""
    tables = None
    if job.table_variables():
        memory = TableMemory.private(job.table_layouts())
        tables = Tables(job.table_updates(), memory)
    return Shard(
        layout,
        job.update(),
        threads=None,
        device=device,
        batch_size=job.worker_batch_size,
        tables=tables,
    )


class OwnRows(RowSource):
    """The rows of a shard of this process; no update is under way."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    def read(self, wanted: Sequence[tuple[int, Ids]]) -> list[Rows]:
        return [self._tables.rows(table, ids) for table, ids in wanted]


class LocalExchange(Exchange):
    """One worker's exchange with a shard of its own, which holds all parameters.

    ``failure``: why the job cannot go on, else ""; ``failure_code``: the exit code then.
    """

    def __init__(
        self, job: Job, shard: Shard, ledger: Ledger, between_steps: Callable[[], Awaitable[None]]
    ) -> None:
        """``between_steps`` is awaited after every step; the parameters do not change meanwhile."""
        self._job, self.shard = job, shard
        self._between_steps = between_steps
        self._gradient = shard.segment.gradient(GRADIENT)
        tables = shard.tables
        self.rows = None if tables is None else OwnRows(tables)
        self._row_buffer = None if tables is None else tables.memory.buffer(GRADIENT)
        self.coordinator = Coordinator(
            make_policy(job.policy),
            shards=1,
            workers=1,
            steps=job.steps,
            version=shard.version,
            ledger=ledger,
            lookahead=job.prefetch,
            evaluate_every=job.evaluate_every,
        )
        if job.epochs and ledger.limit is None:
            ledger.limit = 0
        self.staleness = Staleness()
        self.throughput = Throughput()
        self.loss = float("nan")  # of the last step
        self.steps = 0
        self.failure = ""
        self.failure_code: int = ExitCode.OK
        self._release: Answer | None = None  # of the worker, since its last step
        self._result: Literal["applied", "accumulated", "dropped", "refused"] = "refused"
        self._reason = ""

    async def join(self) -> Membership:
        self._handle(Joined(WORKER, incarnation=1))
        self._handle(PullArrived(WORKER))
        batches, stop, begun = self._take_release()
        return Membership(
            layouts=[self.shard.layout],
            parameters=[self.shard.parameters],
            gradients=[self._gradient],
            batches=batches,
            stop=stop,
            is_own=True,
            rows=self.rows,
            round=begun,
        )

    async def finish(self, report: StepReport) -> StepResult:
        self.steps += 1
        self.loss = report.loss
        self._result, self._reason = "refused", "the loss or the gradient is NaN or infinite"
        if report.finite:
            self.shard.segment.note_absent(GRADIENT, self.shard.layout.numbers_of(report.absent))
            if self._row_buffer is not None:
                self._row_buffer.write(report.rows)
            self.shard.stage(WORKER, GRADIENT, self.steps, weight_of(report))
        began_at = time.perf_counter()
        self._handle(PushArrived.of(WORKER, self.steps, report))
        update_s = time.perf_counter() - began_at
        if refused := divergence(self.coordinator.refused, self._job.max_nonfinite):
            self._fail(ExitCode.DIVERGED, refused)
        await self._between_steps()
        batches, stop, begun = self._take_release()
        return StepResult(
            result=self._result,
            batches=batches,
            stop=stop,
            reason=self._reason,
            update_s=update_s,
            round=begun,
            step=self.shard.version,
        )

    async def wait_for_end(self) -> None:
        """Return at once: there are no other tasks."""

    def leave(self, reason: str) -> None:
        """Do nothing: there are no other tasks."""

    def close(self, exit_code: int, reason: str, *, at_once: bool = False) -> None:
        """End the job early, after the step that is under way, or ``at_once`` without one."""
        self._handle(Close(at_once, exit_code, reason))

    def extend(self, limit: int) -> None:
        """Let the worker go on with batches up to this number."""
        self._handle(Extend(limit))

    def _take_release(self) -> tuple[tuple[int, ...], bool, Round | None]:
        """Return the batches that come next, whether the job needs no more, and the round.

        The job fails if the worker has to wait, as there is no other one.
        """
        release, self._release = self._release, None
        if release is None and not self.failure:
            reasons = "; ".join(each.reason for each in waiting.held(self.coordinator))
            text = f"the only worker waits for others, and none can join: {reasons}"
            self._fail(ExitCode.PEER_LOST, text)
        if release is None or self.failure or self.coordinator.finished:
            return (), True, None
        begun, shard, steps = None, self.shard, release.local_steps
        if steps:
            begun = Round(shard.version, steps, shard.learning_rate, release.sends_difference)
        return release.batches, release.stop, begun

    def _fail(self, code: int, text: str) -> None:
        """The job cannot go on; the first reason counts."""
        if not self.failure:
            log.error("%s", text)
            self.failure, self.failure_code = text, code
            self._handle(GivenUp())

    def _handle(self, event: Event) -> None:
        """Carry out the coordinator's orders after an event."""
        for order in self.coordinator.handle(event):
            match order:
                case Answer():
                    self._release = order
                case Drop(reason=reason):
                    self._result, self._reason = "dropped", reason
                case _:
                    self._carry_out(order)

    def _carry_out(self, order: Order) -> None:
        try:
            result = self.shard.carry_out(order)
        except (ConfigError, SegmentError) as error:
            if self.shard.is_changing:  # half of the change is made
                raise
            self._result, self._reason = "dropped", str(error)
            self._fail(error.exit_code, str(error))
            return
        if result == "unchanged":
            return
        self._result, self._reason = result, ""
        if result == "applied":
            self.throughput.observe(self.shard.version, time.monotonic())
            self.staleness.observe(0)  # there is no other worker
