"""Epochs: the work between two passes over the data, while no worker computes.

The validation data is measured, callbacks are called, and their requests are carried out. Then the
job goes on. Measures and the states of callbacks are in a file of the logdir, with which a job that
resumes or a new chief goes on.

A job by steps is one epoch, of its steps. It ends as any job by steps does, without a wait.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from zmqtrain.callbacks.base import CallbackList, Logs, ModelView, Weights, called_by_steps
from zmqtrain.callbacks.history import History, plain
from zmqtrain.chief.conducted import At, ConductedJob, since
from zmqtrain.chief.evaluator import Evaluator
from zmqtrain.compute.offload import in_daemon
from zmqtrain.coordination.endings import completion
from zmqtrain.errors import ConfigError
from zmqtrain.files import read_file, replace_file
from zmqtrain.job import Job
from zmqtrain.job_checks import ENDLESS
from zmqtrain.models.base import as_model
from zmqtrain.optim.schedules import has_rate, rate_at
from zmqtrain.planning.job_fingerprint import optimizer_text
from zmqtrain.protocol.status import Status
from zmqtrain.store.durable import writing
from zmqtrain.store.logdir import HISTORY_FILE
from zmqtrain.training.measuring import measures_of

log = logging.getLogger(__name__)


@dataclass
class _BySteps:
    """A callback that is called when the job passes a multiple of some steps."""

    callback: Any
    every: int
    step: int = ENDLESS  # of its last call, or where the job began
    last: At | None = None  # its last call in this epoch


class Epochs:
    """The epochs of one job."""

    def __init__(
        self, job: Job, batches: int, evaluator: Evaluator, conducted: ConductedJob
    ) -> None:
        """``batches``: number of batches in an epoch."""
        self.batches, self._count = batches, job.epochs or 1
        self.history = History()
        self.model = ModelView(job.model, job.metrics)
        self.ended = ""  # why the training is over, "" while it is not
        self._job, self._evaluator, self._conducted = job, evaluator, conducted
        params = {"epochs": self._count, "steps": batches, "verbose": 1}
        self.history.params = self._params = params
        self._callbacks = CallbackList(job.callbacks)
        self._follows_batches = self._callbacks.has("on_train_batch_end") or self._callbacks.has(
            "on_train_batch_begin"
        )
        self._records: list[dict[str, Any]] = []  # of epochs, as in the file
        self._file = None if job.logdir is None else Path(job.logdir) / HISTORY_FILE
        self._generation: int | None = None  # in which the callbacks have begun
        self._epoch: int | None = None  # that is under way
        self._batch = 0  # the last one of it that callbacks know
        self._by_steps = [_BySteps(*each) for each in called_by_steps(job.callbacks)]
        self._rate: float | None = None  # set by a callback
        self._is_rate_used = False  # by the next steps

    async def begin(self, at: At) -> int | None:
        """Begin the training, or go on with it, also with an earlier checkpoint.

        Returns what :meth:`next_limit` returns.

        Raises:
            ConfigError, DataError: a callback raises, or monitors an unknown measure.
            CheckpointError: weights that a callback sets cannot be handed over.
        """
        done, batch = self._place(at)
        if self._generation is None:
            names = await in_daemon(self._evaluator.names)
            known = [*dict.fromkeys(["loss", *names]), *(f"val_{name}" for name in names)]
            self._callbacks.check(known, is_all=False)
            await self._read_records()
            self._check_length(at)
        if self._generation != self._conducted.generation:
            await self._go_back(done, at)
        if self._epoch is None and not batch and done - 1 > self._last_epoch:
            self._epoch = done - 1  # it is over, and its callbacks were not called
        if self._epoch is None and done >= self._job.epochs > 0:
            log.warning(
                "epoch %d of %d is done already, so there is nothing to train; give more epochs, "
                "or another logdir",
                done,
                self._job.epochs,
            )
        return await self.next_limit(at)

    async def next_limit(self, at: At) -> int | None:
        """End the epoch that is over, and begin the next one.

        Returns the number of the batch at which the epoch under way ends; None if there is none.

        Raises:
            ConfigError, DataError: a callback raises, or an evaluation fails.
            CheckpointError: the file cannot be written.
        """
        done, batch = self._place(at)
        if self._epoch is not None and done > self._epoch:
            epoch, self._epoch = self._epoch, None
            await self._end_epoch(epoch, at)
        if self.model.stop_training and not self.ended:
            self.ended = f"stopped by a callback after epoch {done} of {self._count}"
        elif done >= self._count:
            of_epochs = f"epoch {done} of {self._count} is done"
            self.ended = of_epochs if self._job.epochs else completion(at.step, self.batches)
        if self.ended:
            return None
        if self._epoch is None:
            await self._show(at.step)
            await self._call("on_epoch_begin", done, {})
            await self._use_weights(goes_on=batch > 0)
            await self._use_rate()
            self._epoch, self._batch, self.model.reader = done, 0, _refuse_weights
            for one in self._by_steps:
                one.last, one.step = None, min(one.step, at.step)
            if self._follows_batches:
                self._callbacks.call("on_train_batch_begin", 0, {})
        return (done + 1) * self.batches

    async def step(self, at: At) -> bool:
        """Show callbacks the progress of the epoch; called after steps, in the thread that trains.

        Returns False if the training is over: as in Keras, a callback may end it within an epoch.

        Raises:
            ConfigError: a callback raises, or sets weights, while others may compute.
        """
        if self._epoch is None:
            return True
        await self._show_evaluations()
        await self._call_by_steps(at)
        epoch, batch = self._place(at)
        batch, is_within = (batch, True) if epoch == self._epoch else (self.batches, False)
        if self._follows_batches and batch > self._batch:
            self._batch = batch
            self._callbacks.call("on_train_batch_end", batch - 1, self._trained(at))
            if is_within and not self.model.stop_training:
                self._callbacks.call("on_train_batch_begin", batch, {})
        if self.model.weights_changed:
            raise ConfigError(
                "a callback sets weights within an epoch; expected at the begin or the end of an "
                "epoch or of the training, when nobody computes; use another hook"
            )
        await self._use_rate()
        if self.model.stop_training and is_within:
            epochs = f"{self._epoch + 1} of {self._count}"
            self.ended = f"stopped by a callback in epoch {epochs}, after {batch} batches"
        return not self.ended

    async def _call_by_steps(self, at: At) -> None:
        """Call the callbacks that have passed a multiple of their steps."""
        for one in self._by_steps:
            if at.step // one.every > one.step // one.every:
                await self._call_after(one, since(one.last, at))
                one.last, one.step = at, at.step

    async def _call_after(self, one: _BySteps, at: At) -> None:
        self._note(at)
        self._show_rate(at.step)
        read, average = self._conducted.read_parameters, self._job.evaluate_average
        self.model.reader = _for_hooks(lambda: read(average))
        hook = CallbackList([one.callback]).call
        try:
            await asyncio.to_thread(hook, "on_steps", at.step, self._trained(at))
        finally:
            self.model.reader = _refuse_weights

    async def _show_evaluations(self) -> None:
        """Let callbacks see the evaluations that were made since the last look."""
        while self._evaluator.reported:
            self.model.step, measures = self._evaluator.reported.pop(0)
            await self._call("on_test_begin", {})
            await self._call("on_test_end", measures)

    async def end(self, at: At) -> Weights:
        """End the training, also one that was interrupted.

        Returns the weights that callbacks have chosen as the result; {}: they have chosen none.

        Raises:
            ConfigError, DataError, CheckpointError: a callback raises.
        """
        if self._generation is None:
            return {}
        await self._show_evaluations()
        if self._epoch is not None and self.ended and self._epoch > self._last_epoch:  # within it
            await self._call_by_steps(at)
            await self._end_epoch(self._epoch, at)
        await self._show(at.step)
        await self._call("on_train_end", self._records[-1]["logs"] if self._records else {})
        if not self.model.weights_changed:
            return {}
        self._evaluator.forget()
        return dict(self.model.weights)

    async def _end_epoch(self, epoch: int, at: At) -> None:
        logs = self._trained(at)
        await self._show(at.step)
        self._note(at)
        await self._call("on_test_begin", {})
        measures = await self._evaluator.evaluate(at.step)
        await self._call("on_test_end", measures)
        logs |= {f"val_{name}": value for name, value in measures.items()}
        self._callbacks.check(list(logs))  # the measures of steps are known now
        await self._call("on_epoch_end", epoch, logs)
        self._note_rate()
        self.history.add(epoch, logs)
        self._records.append(
            {
                "epoch": epoch,
                "logs": {name: plain(value) for name, value in logs.items()},
                "batches": self.batches,
                "learning_rate": self._rate,
                "optimizer": optimizer_text(self._job),
                "callbacks": await asyncio.to_thread(self._callbacks.state),
                # Where training goes on: if the new weights never come to be, neither was this.
                "generation": self._conducted.generation + int(self.model.weights_changed),
            }
        )
        if self._file is not None:
            with writing(self._file):
                text = json.dumps(self._records)
                await asyncio.to_thread(replace_file, self._file, text.encode())
        await self._use_weights()

    def _trained(self, at: At) -> Logs:
        """Return the measures of the epoch's batches before their updates."""
        weighs = as_model(self._job.model).weighs_measures
        total = at.pass_weight if weighs else at.pass_examples
        measures = measures_of(self._job.metrics, at.pass_sums, total)
        of_rounds = at.of_rounds if isinstance(at, Status) else {}
        return {"loss": at.pass_loss} | measures | of_rounds

    def _note(self, at: At) -> None:
        """Let callbacks see where the job is."""
        self.model.step, self.model.examples = at.step, at.pass_examples
        self.model.status = at if isinstance(at, Status) else None

    def _place(self, at: At) -> tuple[int, int]:
        """Return the number of epochs that are over, and of batches of the next one."""
        return divmod(at.uncounted if self._job.epochs else at.step, self.batches)

    async def _show(self, step: int) -> None:
        """Let callbacks see the weights that are evaluated, and the learning rate of this step."""
        weights = await self._conducted.read_parameters(self._job.evaluate_average)
        self.model.show(weights, _for_hooks(partial(self._use, step)))
        self._show_rate(step)

    async def _use(self, step: int, check: Callable[..., object], use: Callable[..., None]) -> None:
        """Call ``use`` with a checkpoint of now; see :meth:`BaseModel.save`."""
        conducted, saver = self._conducted, self._conducted.saver
        check((await conducted.status()).policy, saver.fingerprint)
        await saver.use(step, conducted.generation, use)

    def _show_rate(self, step: int) -> None:
        rate = getattr(self._job.optimizer, "learning_rate", None)
        known = self._rate if self._rate is not None or rate is None else rate_at(rate, step)
        self.model.optimizer.show(known)

    async def _call(self, hook: str, *arguments: Any) -> None:
        await asyncio.to_thread(self._callbacks.call, hook, *arguments)

    async def _use_weights(self, *, goes_on: bool = False) -> None:
        """Go on with the weights that callbacks have set, if they have.

        ``goes_on``: the epoch has begun before, so its parameters are kept instead.
        """
        if self.model.weights_changed and goes_on:
            log.warning("ignoring weights that a callback has set: the job goes on with its own")
            self.model.show(await self._conducted.read_parameters(self._job.evaluate_average))
        elif self.model.weights_changed:
            await self._conducted.begin_with(self.model.weights)
            self._generation = self._conducted.generation
            self._evaluator.forget()
            self.model.show(self.model.weights)

    def _note_rate(self) -> None:
        """Note the learning rate that callbacks have set, if they have."""
        optimizer = self.model.optimizer
        if not optimizer.changed:
            return
        if not has_rate(self._job.optimizer):
            raise ConfigError(
                f"a callback sets the learning rate of {self._job.optimizer!r}; expected an "
                "optimizer that is a dataclass with learning_rate"
            )
        self._rate, self._is_rate_used = optimizer.learning_rate, False
        optimizer.show(self._rate)

    async def _use_rate(self) -> None:
        """Make the next steps use the learning rate that callbacks have set, or the job's own."""
        self._note_rate()
        if not self._is_rate_used:
            await self._conducted.set_learning_rate(self._rate)
            self._is_rate_used = True

    async def _read_records(self) -> None:
        if self._file is None or not self._file.exists():
            return
        try:
            records = json.loads(await in_daemon(read_file, self._file))
            _history_of(records)
            self._records = records
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("ignoring %s and its epochs: %s", self._file, error)

    def _check_length(self, at: At) -> None:
        """Refuse to go on with epochs of another length, which could not be counted."""
        if not self._job.epochs or not at.uncounted:
            return
        last = self._records[-1].get("batches", self.batches) if self._records else at.limit
        if last is not None and (last % self.batches or (self._records and last != self.batches)):
            had = "an epoch had {} batches" if self._records else "an epoch ends at batch {}"
            raise ConfigError(
                f"{had.format(last)}, and now an epoch has {self.batches}; expected the same "
                "steps_per_epoch, since epochs are counted; give it, or another logdir"
            )

    @property
    def _last_epoch(self) -> int:
        """The last epoch that has ended; -1 if none has."""
        return self._records[-1]["epoch"] if self._records else -1

    async def _go_back(self, done: int, at: At) -> None:
        """Be where a generation begins, or is taken over; callbacks begin the training anew there.

        They do not if they have begun, and none of their epochs was lost.
        """
        before, here = self._records, self._conducted.learned_until
        self._records = [r for r in before if r["epoch"] < done and r.get("generation", 0) <= here]
        self._epoch, self._is_rate_used = None, False
        if self._generation is not None and self._records == before:
            if self._place(at)[1]:  # the steps that ended this epoch are lost
                self.ended, self.model.stop_training = "", False
            self._generation = self._conducted.generation
            return await self._show(at.step)
        self._generation = None  # until the callbacks have begun
        self.ended, self.model.stop_training = "", False  # decisions of abandoned epochs
        read = _history_of(self._records)
        self.history.epoch, self.history.history = read.epoch, read.history
        self._rate = self._rate_at(at)
        await self._show(at.step)
        params = self._params | {"initial_epoch": done}
        await asyncio.to_thread(self._callbacks.begin, self.model, params)
        await self._call("on_train_begin", {})
        states = self._records[-1]["callbacks"] if self._records else []
        await asyncio.to_thread(self._callbacks.restore, states)
        self._note_rate()
        await self._use_weights(goes_on=at.step > 0)
        self._generation = self._conducted.generation

    def _rate_at(self, at: At) -> float | None:
        """Return the learning rate to go on with: of this step, or set after the last epoch."""
        if not self._records or self._place(at)[1]:
            return at.learning_rate
        record, optimizer = self._records[-1], optimizer_text(self._job)
        is_of_it = record.get("optimizer", optimizer) == optimizer
        rate: float | None = record["learning_rate"] if is_of_it else at.learning_rate
        return rate


def _history_of(records: Sequence[Mapping[str, Any]]) -> History:
    return History.of([record["logs"] | {"epoch": record["epoch"]} for record in records])


def _for_hooks(call: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
    """Return a function that makes a call in the loop of this task, for the threads of hooks."""
    loop = asyncio.get_running_loop()
    return lambda *given: asyncio.run_coroutine_threadsafe(call(*given), loop).result()


def _refuse_weights() -> Weights:
    raise ConfigError(
        "a callback looks at the weights within an epoch, while others may change them; expected "
        "another hook, such as on_steps(step, logs) with every_steps=100"
    )
