"""A run of one worker that trains alone: no other task, no messages.

The chief's work is done here between two steps.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zmqtrain.actors.process_identity import process_name
from zmqtrain.chief.conductor import WATCH_S, Conductor
from zmqtrain.chief.evaluator import Evaluator
from zmqtrain.chief.saving import Saver
from zmqtrain.compute.device import make_device
from zmqtrain.compute.offload import in_daemon
from zmqtrain.config.cluster import Role
from zmqtrain.coordination.figures import PassFigures
from zmqtrain.coordination.ledger import Ledger
from zmqtrain.coordination.status import figures_of
from zmqtrain.data.description import describe
from zmqtrain.exchanges.local import WORKER, LocalExchange, own_shard
from zmqtrain.fingerprint import DATA
from zmqtrain.models.base import Dataset
from zmqtrain.models.rows import TableReader, kept, readers_of
from zmqtrain.observe.metrics import Metrics
from zmqtrain.observe.summary import Summary
from zmqtrain.optim import AVERAGE
from zmqtrain.planning.job_fingerprint import restored_batches, restored_rate
from zmqtrain.planning.plan import Plan
from zmqtrain.planning.strategy import MIRRORED
from zmqtrain.protocol.checkpoint import Saved
from zmqtrain.protocol.status import Status, TableStatuses, TaskStatus
from zmqtrain.store import checkpoint
from zmqtrain.store.layout import empty_values
from zmqtrain.store.manifest import PARAMETERS, read_manifest
from zmqtrain.training.loop import TrainingLoop
from zmqtrain.training.own_loop import LoopBridge, LoopEndedError, Place
from zmqtrain.training.step_times import StepTimes

YIELD_S = 0.02  # longest time until the event loop may handle signals

log = logging.getLogger(__name__)


class LocalRun:
    """Trains one job in this process."""

    def __init__(
        self,
        plan: Plan,
        data: tuple[Dataset, Dataset | None],
        on_progress: Callable[[Status], None],
    ) -> None:
        """``data``: training set and evaluation set."""
        job = self._job = plan.job
        (self._layout,) = plan.layouts
        self._training, self._evaluation = data
        self._fingerprint = plan.fingerprint()
        self.generation = self.learned_until = 0
        self.stopped = 0, "stopped by a signal"
        self.summary: Summary | None = None  # once it has ended
        self._exchange: LocalExchange | None = None  # once there are parameters
        self._next_yield = self._next_look = 0.0
        self._epoch_batches = 0  # of a whole epoch, once one has begun
        metrics = Metrics(Role.CHIEF)
        self.saver = Saver(job, plan.layouts, self._fingerprint, metrics, self.write_shards)
        reads = self.read_parameters, self._tables
        self._evaluator = Evaluator(job, self._evaluation, metrics, *reads)
        self._conductor = Conductor(
            job,
            self,
            self._evaluator,
            self._evaluator.report_if_due,
            on_progress,
            training=self._training,
        )

    def stop(self, code: int) -> None:
        """End the run after the current step, with this exit code; the first call decides."""
        self.stopped = self.stopped[0] or code, self.stopped[1]
        self._running.close(*self.stopped)

    async def begin(self) -> None:
        """Check what the run needs, and restore or initialise the parameters.

        Raises:
            ZmqTrainError: it cannot begin.
        """
        if self._job.logdir:  # its checkpoints say of which data they are
            self._fingerprint[DATA] = await in_daemon(describe, self._training)
        await self.saver.check()
        await self._evaluator.check()
        path, self.learned_until, generation = await self.saver.newest()
        device = make_device("gpu", "--ps-device") if self._job.ps_device == "gpu" else None
        shard = own_shard(self._job, self._layout, device)
        ledger = Ledger()
        if path is None:
            shard.initialize(self._layout.flat_of(self._job.initial_values()))
        else:
            manifest = read_manifest(path)
            shard.restore(path, manifest)
            shard.learning_rate = restored_rate(self._job, manifest)
            ledger = Ledger.restored(restored_batches(manifest, self._fingerprint))
        self.generation = generation + 1
        await self.saver.note_generation(self.generation)
        self._exchange = LocalExchange(self._job, shard, ledger, self._between_steps)

    async def train(self) -> Summary:
        """Train to the end, once it has begun; return the summary.

        Raises:
            ZmqTrainError: it cannot go on.
        """
        exchange = self._running
        if not await self._conductor.begin(await self.progress()):
            await self.close(*self._conductor.verdict(await self.status()))
        times = StepTimes(Metrics(Role.WORKER))
        loop = TrainingLoop(self._job, self._training, exchange, times)
        if isinstance(self._job.model, LoopBridge):
            found = WORKER, 1, self._evaluation, lambda: exchange.coordinator.version
            self._job.model.place = Place(*found, self._save, asyncio.get_running_loop())
        try:
            await loop.run()
        except LoopEndedError as error:
            log.info("%s", error)
        finally:
            loop.close()
        end = self._conductor.end
        self.summary = await end(await self.status(), job=self._job.name, ps=0, workers=1)
        return self.summary

    @property
    def _running(self) -> LocalExchange:
        if self._exchange is None:
            raise RuntimeError("the run has not begun")
        return self._exchange

    async def progress(self) -> PassFigures:
        found = PassFigures.of(self._running.coordinator)
        found.learning_rate = self._running.shard.learning_rate
        found.limit = None if self._running.coordinator.finished else found.limit
        return found

    async def _between_steps(self) -> None:
        """Call back, evaluate, show progress and save when due, while no step is under way."""
        step, now = self._running.coordinator.version, time.monotonic()
        if self._job.has_epochs and not await self._conductor.follow(await self.progress()):
            await self.close(*self._conductor.verdict(await self.status()))
        await self._evaluator.report_if_due(step)
        await self._conductor.save_if_due(step)
        if now < self._next_yield:
            return
        self._next_yield = now + YIELD_S
        await asyncio.sleep(0)
        if now < self._next_look:
            return
        self._next_look = now + WATCH_S
        await self._conductor.show(await self.status())

    async def _save(self) -> str | None:
        await self._conductor.save(self._running.coordinator.version)
        return self.saver.last

    async def write_shards(self, directory: Path) -> Saved:
        """Write the only shard into the directory of a checkpoint."""
        exchange = self._running
        shard, coordinator = exchange.shard, exchange.coordinator
        copy = shard.write(directory)
        written = await asyncio.to_thread(checkpoint.seal_shard, copy, 0, shard.version)
        ledger, rate = coordinator.ledger.state(), shard.learning_rate
        policy, files = self._job.policy, (written,)
        return Saved(coordinator.version, policy, ledger, files, learning_rate=rate)

    async def read_parameters(self, average: bool = False) -> dict[str, Any]:
        shard = self._running.shard
        values = empty_values(self._job.variables())
        self._layout.scatter(shard.slots[AVERAGE] if average else shard.parameters, values)
        return values | self._job.frozen()

    def _tables(self) -> Mapping[str, TableReader]:
        return readers_of(self._job.table_variables(), self._running.rows)

    async def keep_tables(self) -> dict[str, TableReader]:
        tables = self._running.shard.tables
        return kept(self._job.table_variables(), () if tables is None else tables.trained())

    async def begin_with(self, weights: Mapping[str, Any]) -> None:
        self.generation += 1
        shard = self._running.shard
        for key, flat in {PARAMETERS: shard.parameters, **shard.slots}.items():
            if key in (PARAMETERS, AVERAGE):
                self._layout.gather(weights, flat)
        shard.load()

    async def set_learning_rate(self, rate: float | None) -> None:
        self._running.shard.learning_rate = rate

    async def extend(self, limit: int, epoch_batches: int) -> None:
        self._epoch_batches = epoch_batches
        self._running.extend(limit)

    async def settle(self, *, unannounced: bool = False) -> None:
        """Every step is applied before the next one begins."""

    async def close(self, exit_code: int, reason: str) -> None:
        self._running.close(exit_code, reason, at_once=True)

    async def table_status(self) -> TableStatuses:
        return self._running.shard.table_status()

    async def status(self) -> Status:
        exchange, job = self._running, self._job
        coordinator = exchange.coordinator
        figures = figures_of(job, coordinator, exchange.throughput, exchange.staleness)
        steps = job.steps_of_epoch(self._training)
        if job.epochs:  # which may have begun anew, with other data
            steps = coordinator.version + job.epochs * steps - figures["uncounted"]
        worker = TaskStatus(
            role=Role.WORKER,
            index=WORKER,
            state="done" if coordinator.finished else "computing",
            incarnation=0,
            step=exchange.steps,
            leases=tuple(coordinator.ledger.leases.get(WORKER, ())),
            loss=exchange.loss,
            process=process_name(),
        )
        return Status(
            event=0,
            initialised=True,
            policy=job.policy,
            switching="",
            steps=steps,
            failure=exchange.failure,
            failure_code=exchange.failure_code,
            all_delivered=True,
            save_wanted=False,
            loss=exchange.loss,
            tasks=(worker,),
            waits=(),
            strategy=MIRRORED if job.devices else "local",
            tables=await self.table_status(),
            exchange="nccl" if job.exchange == "nccl" else "local",
            epoch_batches=self._epoch_batches,
            **figures | asdict(await self.progress()),
        )
