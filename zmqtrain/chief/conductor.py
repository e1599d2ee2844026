"""The conductor of any job, of a cluster or of one worker in this process.

It calls callbacks between epochs, saves, evaluates, and ends the job with a summary.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from zmqtrain.callbacks.base import Weights
from zmqtrain.callbacks.history import History
from zmqtrain.chief.conducted import At, ConductedJob
from zmqtrain.chief.epochs import Epochs
from zmqtrain.chief.evaluator import Evaluator
from zmqtrain.chief.run_record import RunRecord
from zmqtrain.errors import CheckpointError, ConfigError, DataError, ExitCode, ZmqTrainError
from zmqtrain.job import Job
from zmqtrain.job_conflicts import unused_by
from zmqtrain.metrics import Measures
from zmqtrain.models.base import Dataset
from zmqtrain.observe.summary import Summary
from zmqtrain.policies import make_policy
from zmqtrain.protocol.status import Status

SAVE_AGAIN_S = 0.5  # after the last checkpoint failed
WATCH_S = 0.25  # how often progress is shown, and evaluations and saves become due

log = logging.getLogger(__name__)


class Conductor:
    """Conducts one job from its first epoch to its summary."""

    def __init__(
        self,
        job: Job,
        conducted: ConductedJob,
        evaluator: Evaluator,
        evaluate_due: Callable[[int], Awaitable[None]],
        on_progress: Callable[[Status], None],
        *,
        training: Dataset,
        name: str = "",
    ) -> None:
        """``evaluate_due`` makes the evaluations that are due at a step. ``training``: the set.

        ``name``: name of the job for users, if it has a better one than its model.
        """
        self._job, self._conducted, self._saver = job, conducted, conducted.saver
        self._evaluator, self._evaluate_due = evaluator, evaluate_due
        self._on_progress = on_progress
        self.record = RunRecord(name or job.name, lambda: evaluator.evaluations, job.logdir)
        self._epochs = None
        if job.has_epochs:
            self._epochs = Epochs(job, job.steps_of_epoch(training), evaluator, conducted)
        self._failure: ZmqTrainError | None = None  # of a callback, or of an epoch's evaluation
        if text := unused_by(make_policy(job.policy), job):
            log.warning("%s", text)

    async def show(self, status: Status) -> None:
        """Show the status to people, and record it."""
        self.record.take(status, saved=self._saver.last_step)
        self._on_progress(status)
        await self.record.save_if_due()

    async def begin(self, at: At) -> bool:
        """Begin the epochs, or go on with them in a new generation; return whether there are any.

        Raises:
            ConfigError, DataError, CheckpointError: a callback or an evaluation fails.
        """
        if self._epochs is None:
            return True
        if _is_held(at):
            await self._settle_epoch(at)
        return await self._extend(await self._epochs.begin(at))

    async def follow(self, at: At, *, begins: bool = False) -> bool:
        """Call the callbacks, or begin; return whether the training goes on: not if one fails."""
        try:
            return await (self.begin(at) if begins else self._follow(at))
        except (ConfigError, DataError, CheckpointError) as error:
            log.error("%s", error)
            self._failure = error
            return False

    async def _follow(self, at: At) -> bool:
        epochs = self._epochs
        if epochs is None:
            return True
        if not await epochs.step(at):
            return False
        if not _is_held(at):
            return True
        await self._settle_epoch(at)
        return await self._extend(await epochs.next_limit(at))

    async def _settle_epoch(self, at: At) -> None:
        """Let callbacks see the whole epoch; one of its steps may be due to be evaluated, too."""
        await self._conducted.settle(unannounced=True)
        await self._evaluate_due(at.step)

    async def _extend(self, limit: int | None) -> bool:
        if limit is not None and self._job.epochs and self._epochs is not None:
            await self._conducted.extend(limit, self._epochs.batches)
        return limit is not None

    async def save_if_due(self, step: int, *, is_wanted: bool = False) -> None:
        """Save a checkpoint if it is time for one, or a client wants it."""
        if is_wanted or self._saver.is_due(step):
            with contextlib.suppress(CheckpointError):  # logged and counted; the job goes on
                await self.save(step)

    async def save(self, step: int) -> None:
        """
        Raises:
            CheckpointError: the checkpoint cannot be written.
        """
        await self._saver.save(step, self._conducted.generation)

    async def _save_last(self, step: int, patience_s: float) -> CheckpointError | None:
        """Save, and try again for some time, since the job ends then; return the error, if any."""
        until = time.monotonic() + patience_s
        while True:
            try:
                await self.save(step)
                break
            except CheckpointError as error:
                if time.monotonic() >= until:
                    return error
            await asyncio.sleep(SAVE_AGAIN_S)
        try:
            await self._saver.finish(self._is_stopped)
        except CheckpointError as error:
            if not self._is_stopped():
                return error
            log.error("%s", error)  # the job is resumed from its logdir
        return None

    def _is_stopped(self) -> bool:
        """Whether the job was told to end."""
        return self._conducted.stopped[0] != 0

    async def end(self, status: Status, *, patience_s: float = 0.0, **fields: Any) -> Summary:
        """End the job, which has this status; return the summary.

        ``patience_s``: how long saving is tried. ``fields``: job, ps and workers for the summary.
        """
        self.record.take(status)  # maybe the first; news are what has changed since
        await self._end_steps(status)
        chosen = await self._end_epochs()
        is_over = self._epochs is not None and self._epochs.ended != ""
        if not is_over:
            chosen = {}  # an interrupted job goes on with the weights that it had
        is_complete = is_over or bool(status.failure or (status.stop and not status.stop_code))
        code, ended = self.verdict(status)
        failure: ZmqTrainError | None = await self._save_last(status.step, patience_s)
        measures: Measures = {}
        if is_complete:
            try:
                measures = await self._evaluator.evaluate(status.step, chosen or None)
            except (ConfigError, DataError) as error:
                log.error("not evaluated: %s", error)
                failure = failure or error
        if failure is not None:
            code, ended = failure.exit_code, f"{ended}, but {failure}"
        final = await self._conducted.status()
        self._on_progress(final)
        self.record.take(final, saved=self._saver.last_step, ended=ended)
        await self.record.save()
        fields |= {"exit_code": int(code), "ended": ended, "measures": measures}
        return await self._summary(final, chosen, fields)

    async def _end_steps(self, status: Status) -> None:
        """Let the steps that are under way end; evaluate the last one if it is due."""
        if not status.stop and not status.failure:
            await self._conducted.close(*self.verdict(status))
        if not status.failure:
            await self._conducted.settle()
        if status.stop and not status.stop_code:
            await self._evaluate_due(status.step)
            if self._epochs is not None and not self._job.epochs:  # the only one is over
                self._epochs.ended = self._epochs.ended or status.stop

    async def _summary(self, final: Status, chosen: Weights, fields: Mapping[str, Any]) -> Summary:
        """Return the summary of a job that has ended with the weights ``chosen``; {}: its own."""
        conducted, average = self._conducted, self._job.evaluate_average
        last = chosen or await conducted.read_parameters()
        result = chosen or await conducted.read_parameters(True) if average else last
        return Summary.of(
            final,
            last=last,
            tables={
                name: {"rows": one.rows, "trained": one.trained, "nbytes": one.nbytes}
                for name, one in (await conducted.table_status()).items()
            },
            parameters={**result, **await conducted.keep_tables()},
            history=History() if self._epochs is None else self._epochs.history,
            checkpoint=self._saver.last,
            evaluations=self._evaluator.evaluations,
            **fields,
        )

    async def _end_epochs(self) -> Weights:
        """Call the callbacks at the end; return the weights that they choose as the result."""
        try:
            if self._epochs is not None:
                return await self._epochs.end(await self._conducted.progress())
        except (ConfigError, DataError, CheckpointError) as error:
            self._failure = self._failure or error
        return {}

    def verdict(self, status: Status) -> tuple[int, str]:
        """Return the exit code of the job, and why it ends."""
        if status.failure:
            return status.failure_code, status.failure
        if status.stop_code:  # the job is being closed already
            return status.stop_code, status.stop
        if self._failure is not None:
            return self._failure.exit_code, str(self._failure)
        if self._epochs is not None and self._epochs.ended:
            return ExitCode.OK, self._epochs.ended
        if status.stop:
            return ExitCode.OK, status.stop
        return self._conducted.stopped


def _is_held(at: At) -> bool:
    """Return whether all batches of the epoch are counted, so that no worker computes."""
    return at.limit is not None and at.uncounted >= at.limit
