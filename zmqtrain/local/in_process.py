"""Training inside one Python process: `zmqtrain.run(job)`, for scripts, notebooks and tests.

One worker trains alone, without messages. Several workers, or a given number of ps, are the same
actors as in separate processes, over the memory transport.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import signal
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from zmqtrain.actors.task import JobActor
from zmqtrain.chief.in_process import LocalRun
from zmqtrain.chief.progress import ProgressDisplay
from zmqtrain.compute.generators import generators_kept
from zmqtrain.compute.offload import in_daemon
from zmqtrain.config.cluster import IPC, Cluster, Role
from zmqtrain.config.fit_script import refuse_while_loading
from zmqtrain.config.task import TaskConfig
from zmqtrain.config.timing import Timing
from zmqtrain.errors import ConfigError, DebuggerLeftError, ExitCode
from zmqtrain.hosting.actors import OnProgress, actors_of, chief_among, run_all
from zmqtrain.hosting.process import stop_on_signals
from zmqtrain.job import Job
from zmqtrain.observe.outcome import forget, recorded
from zmqtrain.observe.summary import Summary
from zmqtrain.planning.plan import plan_alone, plan_for
from zmqtrain.planning.strategy import local_cluster
from zmqtrain.roles import launch, script
from zmqtrain.store.logdir import claimed
from zmqtrain.transport.memory import MemoryTransport
from zmqtrain.user_code import mistakes_in_short

log = logging.getLogger(__name__)

Result = TypeVar("Result")


@mistakes_in_short
def run(
    job: Job,
    *,
    workers: int | None = None,
    ps: int | None = None,
    timing: Timing | None = None,
    on_progress: OnProgress | None = None,
) -> Summary:
    """Train ``job`` to its end and return the summary.

    One worker trains alone unless a number of ``ps`` is given. Several have one ps by default; with
    ``ps=0`` each of them hosts a part of the parameters, and the default policy is sync-replicas.
    Ctrl-C ends the run early, with a checkpoint if the job has a logdir. A job with a logdir
    resumes from its last checkpoint.

    ``on_progress`` is called a few times a second with the job's status. Without it a terminal or a
    notebook shows a bar; elsewhere stderr gets a line after 2 s and later every 10 s, or the log at
    level INFO, if that is shown (``logging.basicConfig(level="INFO")``). Without an evaluation set
    the summary's ``loss`` and ``accuracy`` are NaN; ``train_loss`` is there.

    If TF_CONFIG, ``ZMQTRAIN_ROLE`` or honcho makes this process a task of a cluster, it is that
    task until the job ends. The chief's process has the parameters; in the others they are refused,
    and the rest of the summary comes from the chief.

    Raises:
        KeyboardInterrupt: Ctrl-C; if the job had begun, ``summary`` of the error is the run's.
        SystemExit: this process is a task that ended badly, or the user has left the debugger; the
            code says why.
        ConfigError: a number is wrong, or a job file is being loaded.
        RunFailedError: the job failed, for instance by too many gradients with NaN or infinity;
            ``exit_code`` and the text say why, and ``summary`` is that of the run.
        ZmqTrainError: a task cannot go on; the type and the text say why.
    """
    refuse_while_loading("zmqtrain.run")
    job = script.job_of_script(job)
    task = script.task_of_script("zmqtrain.run", workers=workers, ps=ps, timing=timing)
    if task is not None:
        return train_as(task, job, on_progress)
    found = train_here(job, workers=workers, ps=ps, timing=timing, on_progress=on_progress)
    return found.checked()


def train_as(task: TaskConfig, job: Job, on_progress: OnProgress | None = None) -> Summary:
    """Be a task of a cluster until the job ends; return the summary.

    Raises:
        SystemExit: the task ended badly, or was started after the end of its job.
    """
    stop = Stop()

    def reach(actor: JobActor) -> None:
        stop.reach(actor.stop)
        stop_on_signals(actor)

    code, summary = _with_a_loop(lambda: launch.train(task, job, reach, on_progress), stop)
    if code or summary is None:
        raise script.end_of_process(f"{task.task} has ended with exit code {code}", code)
    return summary


def train_here(
    job: Job,
    *,
    workers: int | None = None,
    ps: int | None = None,
    timing: Timing | None = None,
    on_progress: OnProgress | None = None,
    transport: Callable[[], MemoryTransport] = MemoryTransport,
) -> Summary:
    """Train ``job`` as :func:`run` does, in this process alone, and return the summary, also of a
    run that failed. ``transport`` is made on the event loop."""
    workers = 1 if workers is None else workers
    for name, count, least in (("workers", workers, 1), ("ps", 0 if ps is None else ps, 0)):
        if type(count) is not int or count < least:
            raise ConfigError(f"{name} is {count!r}; expected a whole number from {least} on")
    stop = Stop()
    with generators_kept(all_gpus=True), contextlib.closing(ProgressDisplay()) as display:
        show = on_progress or display
        if workers == 1 and ps is None:
            training = run_alone(job, show, stop)
        else:
            cluster = local_cluster(job.strategy, ps, workers, lambda i: f"{IPC}memory/{i}")
            training = _run_cluster(job, cluster, timing or Timing(), show, stop, transport)
        try:
            return _with_a_loop(lambda: asyncio.run(training), stop)
        except DebuggerLeftError as error:  # as Ctrl-C ends a script, without a traceback
            raise script.end_of_process(str(error), ExitCode.INTERRUPTED) from None


def _with_a_loop(train: Callable[[], Result], stop: Stop) -> Result:
    """Call a function that runs an event loop of its own, and return its result.

    Where a loop runs already, as in a notebook, that loop stands still while another thread makes
    the call. Ctrl-C reaches only this thread.
    """
    if not _is_in_a_loop():
        return train()
    with ThreadPoolExecutor(1, thread_name_prefix="zmqtrain") as thread:
        future = thread.submit(contextvars.copy_context().run, train)
        while True:
            try:
                return future.result()
            except KeyboardInterrupt:
                if future.done():
                    raise
                stop()


def _is_in_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class Stop:
    """Ends a run from another thread, as soon as it has begun."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: Callable[[int], object]
        self._code: ExitCode | None = None  # of a call, which counts for later parts of the run

    def reach(self, stop: Callable[[int], object]) -> None:
        """Call ``stop`` with the exit code from now on, and at Ctrl-C."""
        self._loop, self._stop = asyncio.get_running_loop(), stop
        if self._code is not None:
            stop(int(self._code))
        # Only the main thread may set signal handlers.
        if threading.current_thread() is threading.main_thread():
            with contextlib.suppress(NotImplementedError):
                self._loop.add_signal_handler(signal.SIGINT, self)

    async def breaks(self, beginning: Coroutine[Any, Any, Result]) -> Result:
        """Return the result of a part of the run that comes before any training.

        Raises:
            KeyboardInterrupt: the run is stopped meanwhile.
        """
        task = asyncio.ensure_future(beginning)
        self.reach(lambda code: task.cancel())
        with contextlib.suppress(asyncio.CancelledError):
            result = await task
            if self._code is None:  # else the task had ended when it was cancelled
                return result
        raise KeyboardInterrupt

    def __call__(self, code: ExitCode = ExitCode.INTERRUPTED) -> None:
        self._code = code
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the run has ended
                self._loop.call_soon_threadsafe(self._stop, int(code))


async def run_alone(job: Job, on_progress: OnProgress, stop: Stop) -> Summary:
    data = await stop.breaks(in_daemon(job.load_data))
    run = LocalRun(plan_alone(job), data, on_progress)
    with claimed(job.logdir), recorded(job.name, job.logdir, None, lambda: run.summary):
        forget(job.logdir)
        await stop.breaks(run.begin())
        stop.reach(run.stop)
        return await run.train()


async def _run_cluster(
    job: Job,
    cluster: Cluster,
    timing: Timing,
    on_progress: OnProgress,
    stop: Stop,
    make_transport: Callable[[], MemoryTransport],
) -> Summary:
    """Train by all tasks of a cluster, in this process."""
    plan = plan_for(job, cluster)
    data = await stop.breaks(in_daemon(job.load_data))
    transport = make_transport()
    options = timing.model_dump()
    config = TaskConfig(role=Role.CHIEF, job=job.name, lane="memory", **options)
    actors: list[JobActor] = []
    for task in plan.tasks:
        # Workers and the chief use models in different threads: each worker gets a copy.
        own = plan.with_own_model() if task.role is Role.WORKER else plan
        actors += actors_of(config.of(task), own, lambda _: transport, on_progress, data)
    chief = chief_among(actors)
    stop.reach(chief.stop)
    try:
        with claimed(job.logdir), recorded(job.name, job.logdir, None, lambda: chief.summary):
            forget(job.logdir)
            await run_all(actors)
    finally:
        transport.close()
    if chief.summary is None:
        raise KeyboardInterrupt  # Ctrl-C came before the job began
    return chief.summary
