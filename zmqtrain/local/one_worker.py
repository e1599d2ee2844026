"""A run of one worker that trains alone: no other task, no messages.

The tasks of a chief are done here between two steps: begin or resume, show progress, save,
evaluate, end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from zmqtrain.actors.process_identity import process_name
from zmqtrain.callbacks.history import History
from zmqtrain.chief.chief import WATCH_S
from zmqtrain.chief.conclusion import conclude
from zmqtrain.chief.epochs import Epochs, Progress
from zmqtrain.chief.evaluator import Evaluator
from zmqtrain.chief.saving import Saver
from zmqtrain.compute.device import make_device
from zmqtrain.config.cluster import Role
from zmqtrain.coordination.endings import completion
from zmqtrain.coordination.ledger import Ledger, restored_ledger
from zmqtrain.errors import CheckpointError, ConfigError, DataError, ExitCode
from zmqtrain.exchanges.local import WORKER, LocalExchange
from zmqtrain.models.base import Dataset
from zmqtrain.observe.metrics import Metrics
from zmqtrain.observe.summary import Summary
from zmqtrain.optim import AVERAGE
from zmqtrain.planning.plan import Plan
from zmqtrain.planning.strategy import MIRRORED
from zmqtrain.protocol.checkpoint import Saved
from zmqtrain.protocol.status import State, Status, TaskStatus
from zmqtrain.store import checkpoint
from zmqtrain.store.layout import empty_values
from zmqtrain.store.manifest import PARAMETERS, read_manifest
from zmqtrain.store.shard import Shard
from zmqtrain.training.loop import TrainingLoop
from zmqtrain.training.own_loop import LoopEndedError

YIELD_S = 0.02  # longest time until the event loop may handle signals

log = logging.getLogger(__name__)


class LocalRun:
    """Begins, watches and ends one job in this process."""

    def __init__(
        self, plan: Plan, evaluation: Dataset | None, on_progress: Callable[[Status], None]
    ) -> None:
        """``evaluation``: the evaluation set, if there is one."""
        job = self._job = plan.job
        (self._layout,) = plan.layouts
        self._fingerprint = plan.fingerprint()
        self._on_progress = on_progress
        self.generation = self.learned_until = 0
        self._stop_code = 0
        self._exchange: LocalExchange | None = None  # once there are parameters
        self._next_yield = self._next_look = 0.0
        self._epochs: Epochs | None = None
        self._is_ending = False
        self._chosen: dict[str, Any] = {}  # weights that a callback has set at the end
        metrics = Metrics(Role.CHIEF)
        self._saver = Saver(job, plan.layouts, self._fingerprint, metrics, self._write_shard)
        self._evaluator = Evaluator(job, evaluation, metrics, self.read_parameters)

    def stop(self, code: int) -> None:
        """End the run after the current step, with this exit code; the first call decides."""
        self._stop_code = self._stop_code or code
        if self._exchange is not None:
            self._exchange.close()

    @property
    def history(self) -> History:
        """What was measured after each epoch."""
        return History() if self._epochs is None else self._epochs.history

    async def train(self, dataset: Dataset) -> Summary:
        """Train on ``dataset`` to the end; return the summary.

        Raises:
            KeyboardInterrupt: the run was stopped before it began.
            ZmqTrainError: it cannot begin, or cannot go on.
        """
        await self._saver.check()
        await self._evaluator.check()
        exchange = await self._begin()
        if self._stop_code:
            raise KeyboardInterrupt
        self._exchange = exchange
        if self._job.epochs:
            self._epochs = Epochs(self._job, len(dataset), self._evaluator, self)
            self._go_on(await self._epochs.begin(self._progress()))
        loop = TrainingLoop(self._job, dataset, exchange, Metrics(Role.WORKER))
        try:
            await loop.run()
        except LoopEndedError as error:
            log.info("%s", error)
        finally:
            loop.close()
        return await self._end()

    @property
    def _running(self) -> LocalExchange:
        if self._exchange is None:
            raise RuntimeError("the run has not begun")
        return self._exchange

    async def _begin(self) -> LocalExchange:
        """Restore the newest checkpoint, or initialise the parameters.

        Raises:
            CheckpointError: there are checkpoints, and none can be restored.
        """
        path, self.learned_until, generation = await self._saver.newest()
        update, size = self._job.update(), self._job.worker_batch_size
        device = make_device("gpu", "--ps-device") if self._job.ps_device == "gpu" else None
        shard = Shard(self._layout, update, threads=None, device=device, batch_size=size)
        ledger = Ledger()
        if path is None:
            shard.initialize(self._layout.flat_of(self._job.initial_values()))
        else:
            manifest = read_manifest(path)
            shard.restore(path, manifest)
            shard.learning_rate = self._job.restored_rate(manifest)
            ledger = restored_ledger(manifest, self._fingerprint)
        self.generation = generation + 1
        await self._saver.note_generation(self.generation)
        return LocalExchange(self._job, shard, ledger, self._between_steps)

    def _progress(self) -> Progress:
        coordinator = self._running.coordinator
        ledger = coordinator.ledger
        return Progress(
            coordinator.version,
            ledger.uncounted,
            ledger.mean_loss,
            self._running.shard.learning_rate,
            examples=ledger.pass_examples,
            sums=ledger.pass_sums,
        )

    def _go_on(self, limit: int | None) -> None:
        """Train up to this batch; None: the training is over."""
        if limit is None:
            self._running.close(at_once=True)
        else:
            self._running.extend(limit)

    async def _follow_epochs(self, epochs: Epochs) -> None:
        """Call the callbacks; the job ends if one of them raises."""
        try:
            if not await epochs.step(self._progress()):
                self._go_on(None)
            elif self._running.coordinator.is_pass_over:
                self._go_on(await epochs.next_limit(self._progress()))
        except (ConfigError, DataError, CheckpointError) as error:
            self._running.fail(error.exit_code, str(error))

    async def _between_steps(self) -> None:
        """Call back, evaluate, show progress and save when due, while no step is under way."""
        if self._epochs is not None:
            await self._follow_epochs(self._epochs)
        step, now = self._running.coordinator.version, time.monotonic()
        if self._evaluator.is_due(step) and step < self._job.steps:
            await self._evaluator.report(step)
        if now < self._next_yield:
            return
        self._next_yield = now + YIELD_S
        await asyncio.sleep(0)
        if now < self._next_look:
            return
        self._next_look = now + WATCH_S
        self._on_progress(self._status())
        if self._saver.is_due(step):
            with contextlib.suppress(CheckpointError):  # logged and counted; the job goes on
                await self._saver.save(step, self.generation)

    async def _write_shard(self, directory: Path) -> Saved:
        """Write the shard into the directory of a checkpoint."""
        exchange = self._running
        shard, coordinator = exchange.shard, exchange.coordinator
        file = shard.write(directory)
        written = await asyncio.to_thread(checkpoint.seal_shard, file, 0, shard.version)
        ledger, rate = coordinator.ledger.state(), shard.learning_rate
        policy, files = self._job.policy, (written,)
        return Saved(coordinator.version, policy, ledger, files, learning_rate=rate)

    async def read_parameters(self, average: bool = False) -> dict[str, Any]:
        """Return the current variables or their moving averages; at the end, chosen ones."""
        if self._chosen:
            return self._chosen
        shard = self._running.shard
        values = empty_values(self._job.variables())
        self._layout.scatter(shard.slots[AVERAGE] if average else shard.parameters, values)
        return values | self._job.frozen()

    async def write_parameters(self, weights: Mapping[str, Any]) -> None:
        """Go on with these variables; at the end they are the result, and the shard stays."""
        if self._is_ending:
            self._chosen = dict(weights)
            return
        self.generation += 1
        shard = self._running.shard
        for key, flat in {PARAMETERS: shard.parameters, **shard.slots}.items():
            if key in (PARAMETERS, AVERAGE):
                self._layout.gather(weights, flat)
        shard.load()

    async def set_learning_rate(self, rate: float | None) -> None:
        """Use this learning rate from the next step on; None: the optimizer's own."""
        self._running.shard.learning_rate = rate

    def _status(self) -> Status:
        exchange, job, epochs = self._running, self._job, self._epochs
        coordinator = exchange.coordinator
        step = coordinator.version
        counts = {"applied": coordinator.applied, "dropped": coordinator.dropped}
        state: State = "done" if coordinator.finished else "computing"
        stop = epochs.ended if epochs else completion(step, job.steps) if step >= job.steps else ""
        worker = TaskStatus(
            role=Role.WORKER.value,
            index=WORKER,
            state=state,
            incarnation=0,
            step=exchange.steps,
            silent_s=0.0,
            leases=tuple(coordinator.ledger.leases.get(WORKER, ())),
            loss=exchange.loss,
            process=process_name(),
            metrics="",
            lanes="",
        )
        return Status(
            event=0,
            initialised=True,
            policy=job.policy,
            switching="",
            step=step,
            steps=job.steps if epochs is None else job.epochs * epochs.batches,
            stop=stop,
            failure=exchange.failure,
            failure_code=exchange.failure_code,
            all_delivered=True,
            save_wanted=False,
            seconds=exchange.throughput.seconds,
            steps_per_second=exchange.throughput.steps_per_second,
            loss=exchange.loss,
            examples=coordinator.ledger.examples,
            pushes={**counts, "refused": coordinator.refused, "duplicate": 0},
            staleness=exchange.staleness.summary(),
            tasks=(worker,),
            waits=(),
            strategy=MIRRORED if job.devices else "local",
            exchange="nccl" if job.exchange == "nccl" else "local",
        )

    async def _end(self) -> Summary:
        """Call back, save, evaluate, and return the summary."""
        step = self._running.coordinator.version
        self._is_ending = True
        if self._epochs is not None:
            try:
                await self._epochs.end(self._progress())
            except (ConfigError, DataError, CheckpointError) as error:
                self._running.fail(error.exit_code, str(error))
        status = self._status()
        code, ended = status.failure_code, status.failure
        is_complete = bool(status.failure or status.stop)
        if not status.failure:
            code = ExitCode.OK if is_complete else self._stop_code
            ended = status.stop or "stopped by a signal"
        if not status.stop or status.failure:
            self._chosen = {}  # an interrupted job goes on where it was
        code, ended, measures = await conclude(
            code,
            ended,
            lambda: self._saver.save(status.step, self.generation),
            partial(self._evaluator.evaluate, step) if is_complete else None,
        )
        self._on_progress(status)
        last, average = await self.read_parameters(), self._job.evaluate_average
        return Summary.of(
            status,
            last=last,
            parameters=await self.read_parameters(True) if average else last,
            history=self.history,
            job=self._job.name,
            ps=0,
            workers=1,
            checkpoint=self._saver.last,
            evaluations=self._evaluator.evaluations,
            exit_code=code,
            ended=ended,
            measures=measures,
        )
