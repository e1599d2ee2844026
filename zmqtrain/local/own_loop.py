"""`zmqtrain.attach(job)`: the user's own loop takes the place of a worker's.

The worker runs in a thread of its own, so leases, heartbeats and the end of the run are as with any
worker. In a process that is a task of a cluster it is that task's; elsewhere it trains alone.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from bdb import BdbQuit
from collections.abc import Iterator, Mapping
from concurrent.futures import wait
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np

from zmqtrain.adapters.common import numbers_of
from zmqtrain.callbacks import TensorBoard
from zmqtrain.chief.progress import ProgressDisplay
from zmqtrain.compute.generators import generators_kept
from zmqtrain.config.cluster import Role
from zmqtrain.config.fit_script import refuse_while_loading
from zmqtrain.errors import ConfigError, ExitCode, FencedError, PeerLostError, ZmqTrainError
from zmqtrain.hosting import signals
from zmqtrain.job import Job
from zmqtrain.local.in_process import Stop, run_alone
from zmqtrain.metrics import Measures
from zmqtrain.models.base import Parameters
from zmqtrain.models.rows import TableReader
from zmqtrain.observe.summary import Summary
from zmqtrain.roles import launch, script
from zmqtrain.training.evaluation import evaluate, rows_of
from zmqtrain.training.own_loop import Lease, LoopBridge, LoopEndedError, Place
from zmqtrain.user_code import mistakes_in_short, without_own_frames

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""How often a loop that waits looks whether its task still runs."""

_IN_ORDER = (ExitCode.OK, ExitCode.ORPHANED, ExitCode.INTERRUPTED)
"""Exit codes of a run whose loop made no mistake; orphaned if the loop ended before the job."""


@mistakes_in_short
def attach(job: Job) -> Session:
    """Return a session that gives a training loop its batches, for a ``with`` statement.

    If TF_CONFIG, ``ZMQTRAIN_ROLE`` or honcho makes this process a task of a cluster, it is that
    task. A ps and a chief that does not compute get no batches. When the job ends, the loop of the
    chief ends with the trained weights in ``module``. The script of a ps ends there with exit code
    0: it has no weights for the rest.

    Raises:
        SystemExit: a variable has a mistake; see the log.
        ConfigError: a job file is being loaded, the job's model has no adapter, or the job has
            devices.
    """
    refuse_while_loading("zmqtrain.attach")
    train: script.Train | None = None
    role = Role.WORKER
    task = script.current_task()
    if task is not None:
        job, train = task.attach(job), task.train
    else:
        job = script.job_of_script(job)
        if (config := script.task_of_script("zmqtrain.attach")) is not None:
            train, role = partial(launch.train, config), config.role
    if job.devices:
        raise ConfigError(
            f"the job has the devices {', '.join(job.devices)}, but a loop of your own computes on "
            "one; leave them out, or use zmqtrain.run"
        )
    bridge = LoopBridge(job.model)
    return Session(job.model_copy(update={"model": bridge}), bridge, train, role)


class Session:
    """The batches of a job for one loop, which has to step each batch once.

    ``module`` is the trained module, None in JAX. ``steps``: number of those of this worker.
    ``summary`` is set after a run without other tasks, and in a script that is a task by its
    variables; the chief's process has the parameters.
    """

    def __init__(
        self, job: Job, bridge: LoopBridge, train: script.Train | None, role: Role = Role.WORKER
    ) -> None:
        """``train`` runs the task of this process; None: the job trains in this process alone."""
        with generators_kept(all_gpus=True):
            job.variables()  # before that, the model knows no seed
        self.module = bridge.module
        self.summary: Summary | None = None
        self.steps = 0
        self._job, self._bridge, self._train, self._role = job, bridge, train, role
        self._batch: int | None = None  # that has to be stepped
        self._lease: Lease | None = None  # of the next batch, once one was stepped
        self._stop = Stop()
        self._thread = threading.Thread(target=self._run, name="zmqtrain worker", daemon=True)
        self._error: BaseException | None = None
        self._exit_code = 0
        self._stack = ExitStack()
        self._board: TensorBoard | None = None
        self._measured: set[str] | None = None  # names of the measures of each step

    @property
    def worker(self) -> int | None:
        """Index of this worker, once the job has begun; None in a task without a loop."""
        return self._place.worker

    @property
    def workers(self) -> int:
        """Number of workers with which the job began."""
        return self._place.workers

    @property
    def global_step(self) -> int:
        """The global step of the parameters that this worker has read."""
        return self._place.version()

    @property
    def _place(self) -> Place:
        self._await_batch()
        return self._bridge.place

    def _await_batch(self) -> None:
        if self._thread.ident is None:
            raise ConfigError(
                "the session has not begun; write `with zmqtrain.attach(job) as session:`"
            )
        self._lease = self._lease or self._bridge.next()

    def __enter__(self) -> Session:
        self._stack.enter_context(generators_kept(all_gpus=True))
        boards = [one for one in self._job.callbacks if isinstance(one, TensorBoard)]
        if boards:  # one for this thread
            self._board = TensorBoard(boards[0].logdir)
            self._stack.callback(self._board.on_train_end)
        if self._train is not None:
            for number in self._stack.enter_context(signals.restored()):
                signal.signal(number, self._on_signal)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: object, __: TracebackType | None
    ) -> None:
        left_early = kind is None and self._thread.is_alive()
        with self._stack:
            interrupted = kind is not None and issubclass(kind, KeyboardInterrupt)
            self._stop(ExitCode.INTERRUPTED if interrupted else ExitCode.ORPHANED)
            self._bridge.end_loop()
            self._thread.join()
        if kind is BdbQuit and self._train is None:
            raise SystemExit(int(ExitCode.INTERRUPTED)) from None
        if kind is None:
            self._raise(left_early)

    def batches(self) -> Iterator[Any]:
        """Yield batches until the job needs no more gradients; then there are none.

        Raises:
            ConfigError: the last batch was not stepped, or this is outside of ``with``.
            ZmqTrainError: the job cannot go on, or has failed.
            SystemExit: this task was stopped, or is a ps whose job has ended; see the code.
        """
        self._check_stepped()
        self._await_batch()
        while (lease := self._lease) is not None:
            self._batch = lease.number
            yield self._bridge.start(lease)
            self._check_stepped()
        self._thread.join()
        self._raise()
        if self._role is Role.PS:
            raise script.end_of_process("the job of this ps has ended", ExitCode.OK)
        if self.summary is None or not self.summary.has_parameters:
            return
        parameters, tables = _parted(self.summary.parameters)
        if self._role is Role.CHIEF:
            self._bridge.hold({n: np.array(v) for n, v in parameters.items()}, None)
        else:
            self._bridge.refresh()
        self._bridge.keep_tables(tables)

    @mistakes_in_short
    def step(self, loss: Any, *results: Any, **measures: Any) -> int:
        """Hand over the gradient of the last batch, and wait for the updated parameters.

        Returns :attr:`global_step`. ``measures``: means over the batch, such as ``accuracy=0.9``,
        for callbacks and history; every step has the same ones.

        ``loss`` is the mean over the batch. As after a step of an optimizer, the module then holds
        the new values; the loop may change them where one worker trains alone.

        In PyTorch, after ``backward()``. In JAX ``results`` are the gradients and, if the model has
        state, its new state.

        Raises:
            ConfigError: there is no batch to step, or a gradient or a measure cannot be taken.
        """
        if self._batch is None:
            raise ConfigError("step() was called twice for a batch, or before the first one")
        means = numbers_of(measures, self._job.model)
        self._check_measures({*means})
        self._bridge.stepped(self._bridge.finish(loss, *results), means)
        self._batch = None
        self.steps += 1
        self._lease = self._bridge.next()
        return self.global_step

    @mistakes_in_short
    def evaluate(self) -> Measures:
        """Measure the evaluation set with the parameters that this worker has read.

        Rows of tables are the current ones, and not compressed.
        Returns {} after the last step, for the summary has those measures, and if a ps is lost
        meanwhile.

        Raises:
            ConfigError, DataError: there is no evaluation set, or it or the model is wrong.
        """
        examples, job, lease = self._place.evaluation, self._job, self._lease
        if examples is None:
            raise ConfigError(f"{job.data!r} has no evaluation set; expected one to measure")
        if lease is None:
            return {}
        arrays, tables = _parted(lease.parameters)
        exact = {**arrays, **{name: reader.exact() for name, reader in tables.items()}}
        try:
            return evaluate(self._bridge, exact, examples, job.metrics, rows_of(job.batch_size))
        except (FencedError, PeerLostError) as error:
            log.warning("the evaluation was given up: %s", error)
            return {}

    def log(self, values: Mapping[str, Any]) -> None:
        """Write values of this worker at :attr:`global_step`, for TensorBoard.

        Numbers are written as scalars, arrays and tensors as histograms, into the directory
        ``worker-<index>`` of the job's :class:`~zmqtrain.callbacks.TensorBoard`. For means over all
        workers see :meth:`step`.

        Raises:
            ConfigError: the job has no such callback.
        """
        if self._board is None:
            raise ConfigError(
                "session.log() has nowhere to write; expected a job with "
                "callbacks=[TensorBoard(DIRECTORY)] of zmqtrain.callbacks"
            )
        self._board.write(f"worker-{self.worker}", values, self.global_step)

    def save(self) -> str | None:
        """Save a checkpoint of the job, wait for it and return its directory.

        Returns None, without one, after the last step, which is saved anyway, and if this worker is
        stopped or has lost its ps.

        Raises:
            ConfigError: the job has no logdir.
            ZmqTrainError: the checkpoint cannot be written.
        """
        if self._job.logdir is None:
            raise ConfigError("the job has no logdir to save in; give it one (--logdir DIR)")
        save, events = self._place.save, self._place.events
        if self._lease is None or save is None or events is None:
            return None
        saving = asyncio.run_coroutine_threadsafe(save(), events)
        while not wait([saving], LOOK_S).done:
            if not self._thread.is_alive():
                return None
        return None if saving.cancelled() else saving.result()

    def _check_measures(self, names: set[str]) -> None:
        if self._measured is None:
            self._measured = names if self._job.has_epochs else set()
        if names and not self._job.has_epochs:
            raise ConfigError(
                f"step() got the measures {sorted(names)}, which nothing takes in a job without "
                "callbacks and epochs; give Job(callbacks=[JSONLogger('run.jsonl')]) or another "
                "callback, or write them by session.log"
            )
        if names != self._measured:
            raise ConfigError(
                f"step() got the measures {sorted(names)}; expected {sorted(self._measured)}, as "
                "in the first step: give the same names in each"
            )

    def _check_stepped(self) -> None:
        if self._batch is not None:
            raise ConfigError(
                f"batch {self._batch} was not stepped; expected session.step(loss) once for each "
                "batch"
            )

    def _on_signal(self, number: int, _: object) -> None:
        """Stop the worker; the loop ends at its next batch."""
        interrupted = number == signal.SIGINT
        self._stop(ExitCode.INTERRUPTED if interrupted else ExitCode.TERMINATED)

    def _run(self) -> None:
        try:
            if self._train is not None:
                reach = self._stop.reach
                found = self._train(self._job, lambda actor: reach(actor.stop))
                self._exit_code, self.summary = found
            else:
                show = ProgressDisplay(with_bar=False)  # the loop may have a bar of its own
                self.summary = asyncio.run(run_alone(self._job, show, self._stop))
        except BaseException as error:
            self._error = error
        finally:
            self._bridge.end_leases()

    def _raise(self, left_early: bool = False) -> None:
        error, self._error = self._error, None
        if error is not None and not isinstance(error, LoopEndedError):
            raise without_own_frames(error) if isinstance(error, ZmqTrainError) else error
        if self._exit_code or error is not None:
            code = self._exit_code or ExitCode.ORPHANED
            text = f"this task has ended with exit code {code}"
            if left_early and code == ExitCode.ORPHANED:
                epochs = self._job.epochs
                end = f"epoch {epochs}" if epochs else f"step {self._job.steps}"
                text = (
                    f"the script left its loop after {self.steps} steps of this worker, before the "
                    f"end of the job ({end}); expected a loop over all of session.batches(): to "
                    "train less, give the job fewer steps or epochs"
                )
                log.error("%s", text)
            raise script.end_of_process(text, code)
        if self.summary is not None and self.summary.exit_code not in _IN_ORDER:
            self.summary.checked()


def _parted(parameters: Parameters) -> tuple[Parameters, dict[str, TableReader]]:
    """Return the arrays among parameters, and the readers of tables."""
    tables = {name: one for name, one in parameters.items() if isinstance(one, TableReader)}
    return {name: one for name, one in parameters.items() if name not in tables}, tables
