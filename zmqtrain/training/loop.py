"""The training loop of one worker: take a batch, compute, exchange, count.

The exchange sends gradients and receives parameters; the loop knows no wire.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

import numpy as np

from zmqtrain.compute.device import make_device
from zmqtrain.compute.offload import Offload
from zmqtrain.compute.threads import ThreadTeam
from zmqtrain.data.prefetch import Prefetcher
from zmqtrain.data.subset import checked
from zmqtrain.data.weights import with_class_weights
from zmqtrain.errors import DataError, FencedError, ProtocolError
from zmqtrain.job import Job
from zmqtrain.models.base import Batch, Dataset, as_model
from zmqtrain.models.checks import labels_at
from zmqtrain.models.rows import RowSource
from zmqtrain.models.tables import Ids, RowsOf
from zmqtrain.optim.norm import clip_scale, square_of
from zmqtrain.training.exchange import Exchange, Membership, StepReport, StepResult
from zmqtrain.training.local_steps import LocalRounds
from zmqtrain.training.model_runner import ModelRunner, Runner
from zmqtrain.training.own_loop import LoopBridge, RowsOfLoop
from zmqtrain.training.profiling import StepProfile
from zmqtrain.training.step_times import Computed, Step, StepTimes
from zmqtrain.training.towers import Towers
from zmqtrain.user_code import user_code

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class TrainingLoop:
    """Trains one job on one dataset, through one exchange."""

    def __init__(
        self,
        job: Job,
        dataset: Dataset,
        exchange: Exchange,
        times: StepTimes,
        *,
        threads: int | None = None,
        profile: Path | None = None,
        worker: int = 0,
    ) -> None:
        """``threads``: number that check a large gradient for NaN; None: one for each core.
        ``profile``: where some steps are profiled, without a suffix. ``worker``: its index.

        Raises:
            ConfigError: the job needs a GPU that is not there, or the profile cannot be made.
            DataError: the dataset is empty.
        """
        self._job, self._exchange = job, exchange
        self._times, self._metrics = times, times.metrics
        self._plan = job.plan_of(dataset)
        self._prefetcher = Prefetcher(dataset, self._plan, on_read=self._look_ahead)
        self._model = as_model(job.model)
        self._tables = {table.name: table.number for table in job.table_variables()}
        self._ahead: dict[int, list[tuple[int, Ids]]] = {}  # rows that batches to come need
        self._threads, self._team, self._worker = threads, ThreadTeam(threads), worker
        self._runner: Runner = (
            Towers(job, self._team)
            if job.devices
            else ModelRunner(job, make_device(job.device, "--device"), self._team, exchange.written)
        )
        # A loop of the user's own may take any time between two steps; a profile is of one thread.
        self._profile = None if profile is None else StepProfile(job, profile)
        self._may_be_in_place = not isinstance(job.model, LoopBridge) and profile is None
        self._computing = Offload("compute", in_place=self._may_be_in_place)
        self._membership: Membership
        self._rows: RowSource | None = None  # of the membership
        self._rounds: LocalRounds | None = None  # of this membership, once it has begun one
        self._batches: deque[int] = deque()  # that this worker has to compute
        self.has_joined = False
        self.is_computing = False  # a step, or about to
        self.steps = 0

    async def run(self) -> None:
        """Train until the job is over; join again after each FencedError.

        Raises:
            ConfigError, DataError: the model or the dataset raises, or returns something wrong.
            ZmqTrainError: the exchange cannot go on.
        """
        while True:
            try:
                await self._train()
                return await self._exchange.wait_for_end()
            except FencedError as error:
                log.warning("%s; joining again", error)

    async def use_model(self, work: Callable[[], Result]) -> Result:
        """Return the result of ``work``, which uses the job's model; no step runs meanwhile."""
        return await self._computing.run_in_thread(work)

    def close(self) -> None:
        """End the threads, after their current work."""
        self._prefetcher.close()
        if self._rows is not None:
            self._rows.close()  # a thread may wait there for this event loop
        self._computing.close()
        self._runner.close()
        if self._profile is not None:
            self._profile.close()

    async def _train(self) -> None:
        """Join, and make steps until the job needs no more."""
        self._metrics.role_state.set("joining")
        self._prefetcher.forget(self._batches)
        self._batches.clear()
        membership = self._membership = self._seen(await self._exchange.join())
        rows = self._rows = membership.rows
        self._computing.in_place = self._may_be_in_place and not (rows and rows.may_wait)
        self._rounds = None
        self._runner.bind(membership)
        self.has_joined = True
        self._metrics.role_state.set("training")
        self._go_on(membership)
        stop = membership.stop
        while not stop:
            if (result := await self._step()) is not None:
                if self._round is not None and result.round is None:
                    unsent = await self._computing.run(partial(self._round.end, result.step))
                    self._batches.extendleft(reversed(unsent))
                    self._runner.bind(self._membership)
                self._go_on(result)
                stop = result.stop
        self._times.count_last()
        self._metrics.role_state.set("draining")

    def _seen(self, membership: Membership) -> Membership:
        """Return a membership as the model sees it."""
        rows, job = membership.rows, self._job
        if rows is None or not isinstance(job.model, LoopBridge):
            return membership
        return replace(membership, rows=RowsOfLoop(rows, job.table_variables()))

    @property
    def _round(self) -> LocalRounds | None:
        """The rounds, while one is under way; else the worker sends gradients."""
        rounds = self._rounds
        return rounds if rounds is not None and rounds.is_under_way else None

    def _go_on(self, given: Membership | StepResult) -> None:
        """Take up the batches of an answer, for gradients or for a round."""
        self._batches.extend(given.batches)
        if given.round is not None:
            rounds = self._rounds = self._rounds or LocalRounds(
                self._job, self._membership, self._team, self._threads, self._worker
            )
            if not rounds.is_under_way:
                self._runner.bind(rounds.memory)
            rounds.go_on(given.round)

    async def _step(self) -> StepResult | None:
        """Compute a batch, and send its gradient if it is due; return the answer, if any."""
        if self._round is None:
            self._exchange.begin()
        began_at = time.perf_counter()
        is_over = self._round is not None and self._round.is_over  # its last batch was refused
        computed = None if is_over else await self._computed()
        report = await self._to_send(computed)
        if self._round is not None:
            self._metrics.local_step.set(len(self._round.reports))
            if report is not None:
                self._exchange.begin()
        computed_at = time.perf_counter()
        if report is not None:
            report.ahead = self._rows_ahead()
        answer = None if report is None else self._exchange.finish(report)
        self._times.count_last()  # while this one is being sent
        result = None if answer is None else await answer
        if computed is not None:
            self.steps += 1
            self._times.finish(Step(computed, result, began_at, computed_at, time.perf_counter()))
        return result

    def _look_ahead(self, number: int, batch: Batch) -> None:
        """Have the model look at a batch, in the thread that has read it."""
        if self._job.devices:
            return  # each has a model of its own, and a part of the batch
        needed = self._model.look_ahead(batch)
        if needed and self._rows is not None and self._rows.may_wait:
            self._prefetcher.read_ahead_always()  # else the ids to ask for are unknown
            self._ahead[number] = [(self._tables[name], ids) for name, ids in needed.items()]

    def _rows_ahead(self) -> Sequence[tuple[int, Ids]]:
        """Return which rows the next step is expected to read, if that is known by now."""
        for number in list(self._ahead):
            if number not in self._batches:
                del self._ahead[number]
        return self._ahead.pop(self._batches[0], ()) if self._batches else ()

    async def _to_send(self, computed: Computed | None) -> StepReport | None:
        """Return the report of a batch, or of a round that is over; None if it goes on."""
        report = None if computed is None else computed.report
        if self._round is None or (report is not None and not report.finite):
            return report
        return await self._computing.run(self._round.result) if self._round.is_over else None

    async def _computed(self) -> Computed:
        """Compute the next batch."""
        if not self._batches:
            raise ProtocolError("this worker should go on, but received no batch")
        batch = self._batches.popleft()
        for number in islice(self._batches, self._job.prefetch):
            self._prefetcher.prepare(number)
        self.is_computing = True
        try:
            compute = partial(self._compute, batch)
            profiled = self._profile and partial(self._profile.step, compute)
            return await self._computing.run(profiled or compute)
        finally:
            self.is_computing = False

    def _compute(self, number: int) -> Computed:
        began_at = time.perf_counter()
        local = self._round
        batch = self._take(number)
        examples = self._plan.rows(number)
        batch = self._runner.place(batch)
        taken_at = time.perf_counter()
        if local is not None:
            local.load()
        self._runner.load_parameters()
        read_at = time.perf_counter()
        report = self._runner.compute(batch, number, examples)
        if report.finite and self._job.clips_alone:
            self._clip(report.rows)
        if report.finite and local is not None:
            local.apply(report)
        return Computed(report, taken_at - began_at, read_at - taken_at)

    def _clip(self, rows: Sequence[RowsOf]) -> None:
        """Scale the gradient, wherever it was computed, by its global norm with ``rows``."""
        memory, limit = self._membership, self._job.clip_norm or 1.0
        pairs = list(zip(memory.layouts, memory.gradients, strict=True))
        square = sum(square_of(flat[layout.owned_trained], limit) for layout, flat in pairs)
        square += sum(square_of(found.rows.reshape(-1), limit) for found in rows)
        if (scale := clip_scale(float(square), limit)) < 1:
            for layout, flat in pairs:
                flat[: layout.trained] *= np.float32(scale)
            for found in rows:
                np.multiply(found.rows, np.float32(scale), out=found.rows)

    def _take(self, number: int) -> Batch:
        """Return a batch with the examples of the plan."""
        with user_code("take()", self._job.data, DataError, lambda: f"It was batch {number}"):
            batch = self._prefetcher.take(number)
        batch = checked(batch, self._plan.rows(number), self._job.data)
        if self._job.class_weight:
            at = labels_at(self._job.model, batch, "class_weight")
            return with_class_weights(batch, self._job.class_weight, at)
        return batch
