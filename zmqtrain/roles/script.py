"""Scripts of the user's in processes that are tasks of a cluster.

Either zmqtrain runs the script of a task, which attaches with its own loop or calls fit; or the
variables of a process make the script in it a task: ``Trainer.fit``, ``zmqtrain.run`` and
``zmqtrain.attach`` all read them here.
"""

from __future__ import annotations

import gc
import logging
import sys
from bdb import BdbQuit
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

import click
from pydantic import BaseModel

from zmqtrain.compute.threads import limit_restored
from zmqtrain.config.fit_script import ScriptEnd, TrainFit, fit_in_script, run_fit_script
from zmqtrain.config.loading import run_as_script
from zmqtrain.config.options import mistyped, options_of, values_of
from zmqtrain.config.resolvers.honcho import PROCESS_NAME
from zmqtrain.config.task import ENVIRON, OF_A_CLUSTER, TaskConfig, load_task, role_of_script
from zmqtrain.config.timing import Timing
from zmqtrain.errors import ConfigError, ExitCode, RunFailedError, ZmqTrainError
from zmqtrain.hosting import signals
from zmqtrain.hosting.task import IN_A_TASK, OnStart
from zmqtrain.job import Job
from zmqtrain.observe.logs import setup_logging
from zmqtrain.observe.outcome import record_failure
from zmqtrain.observe.summary import Summary
from zmqtrain.user_code import described, from_own_code

log = logging.getLogger(__name__)

Train = Callable[[Job, OnStart], tuple[int, Summary | None]]
"""Runs a task to its end; returns its exit code, and the job's summary if the task learns it."""


@dataclass
class ScriptTask:
    """The task that this process is, while it runs the job's file as a script."""

    name: str
    loaded: Job  # from the job's file, with the options of this task
    overrides: Mapping[str, Any]
    train: Train
    is_attached: bool = False

    def attach(self, job: Job) -> Job:
        """Return the script's job as this task trains it.

        Raises:
            ConfigError: the script has attached before.
        """
        if self.is_attached:
            raise ConfigError(
                "zmqtrain.attach was called twice in a worker; expected one call: a worker takes "
                "part in one job"
            )
        self.is_attached = True
        return job.with_overrides(**self.overrides).loaded_from(self.loaded.source)


_task: ScriptTask | None = None


def current_task() -> ScriptTask | None:
    """Return the task whose script runs in this process, if there is one."""
    return _task


def _refuse_in_a_loop(entry: str) -> None:
    """Refuse to train otherwise in the script of a task: each of its tasks would train alone.

    Raises:
        ConfigError: the script of a task runs, and has not attached to it.
    """
    if _task is not None and not _task.is_attached:
        raise ConfigError(
            f"this script runs as {_task.name} of a job with own_loop, but calls {entry}, which "
            "would train in this process alone; expected zmqtrain.attach(job); or leave own_loop "
            "out of the job"
        )


def run(task: ScriptTask, reference: str) -> int:
    """Run the job's file as the script of a task; return the exit code.

    Raises:
        ConfigError: the script does not attach.
        RunFailedError: it raised an exception, which the log shows.
    """
    global _task
    _task = task
    try:
        with _failures_shown(reference):
            run_as_script(reference)
    finally:
        _task = None
    if not task.is_attached:
        raise ConfigError(
            f"{reference} has a job with own_loop, but did not call zmqtrain.attach(job) when it "
            'was run as a script; expected the call below if __name__ == "__main__":'
        )
    return ExitCode.OK


def run_fit(train: TrainFit, reference: str, overrides: Mapping[str, Any]) -> int:
    """Run a script whose ``Trainer.fit`` calls ``train``; return the exit code.

    ``overrides``: options of its job, whose logdir records a failure after fit, too.

    Raises:
        ConfigError: see :func:`run_fit_script`.
        RunFailedError: it raised an exception, which the log shows, or ended with an exit code.
    """
    trained: list[tuple[Summary, str | None]] = []
    with ExitStack() as before_fit:
        before_fit.enter_context(signals.interrupts_kept())

        def fit(job: Job) -> Summary:
            before_fit.close()
            with process_restored():
                summary = train(job)
            if summary.exit_code == ExitCode.OK:
                trained.append((summary, job.logdir))
            return summary

        try:
            with _failures_shown(reference):
                run_fit_script(reference, fit, overrides)
        except ScriptEnd as end:
            return end.code
        except Exception as error:
            for summary, logdir in trained:
                record_failure(summary, logdir, error)
            raise
    return ExitCode.OK


@contextmanager
def _failures_shown(reference: str) -> Iterator[None]:
    """Turn an exception of the script into an error, and log it with the script's own frames."""
    try:
        yield
    except ZmqTrainError:
        raise
    except BdbQuit as error:
        raise ConfigError(described(error)) from error
    except Exception as error:
        text = f"the script {reference} failed: {described(error)}"
        log.error("the script %s failed", reference, exc_info=from_own_code(error))
        raise RunFailedError(text) from error


@contextmanager
def process_restored() -> Iterator[None]:
    """Restore what a task changes of this process, because its script goes on after the block."""
    threshold = gc.get_threshold()
    with signals.restored(), limit_restored():
        try:
            yield
        finally:
            gc.unfreeze()
            gc.set_threshold(*threshold)


def task_of_script(
    entry: str, *, workers: int | None = None, ps: int | None = None, timing: Timing | None = None
) -> TaskConfig | None:
    """Return the task that this process is by its variables; None: it trains alone.

    ``entry``: what the script has called, with these arguments. What a running task calls, such as
    a callback, trains inside of that task.

    Raises:
        SystemExit: a variable has a mistake, or contradicts the arguments; see the log, and
            :func:`end_of_process`.
        ConfigError: this is the script of a worker, which has to attach.
    """
    if IN_A_TASK.get():
        return None
    _refuse_in_a_loop(entry)
    with mistakes_end_a_task():
        return _task_of_script(entry, workers, ps, timing)


@contextmanager
def mistakes_end_a_task() -> Iterator[None]:
    """End this process for a ConfigError if it is a task of a cluster, as a task without a script.

    Raises:
        SystemExit: there was one; see the log, and :func:`end_of_process`.
    """
    try:
        yield
    except ConfigError as error:
        is_script = _task is not None or fit_in_script() is not None
        if IN_A_TASK.get() or is_script or not _is_task():
            raise
        log.error("%s", error)
        raise end_of_process(str(error), error.exit_code) from error


def _is_task() -> bool:
    """Return whether the variables make this process a task, or would without a mistake in them."""
    try:
        return role_of_script()[0] is not None
    except ConfigError:
        return True


def end_of_process(text: str, code: int) -> BaseException:
    """Return the exception that ends this process with an exit code.

    In one that multiprocessing has started it is a RunFailedError: a pool would never learn of the
    end of its process, and wait forever.
    """
    return SystemExit(int(code)) if parent_process() is None else RunFailedError(text, int(code))


def _task_of_script(
    entry: str, workers: int | None, ps: int | None, timing: Timing | None
) -> TaskConfig | None:
    role, source = role_of_script()
    if role is None:
        if unused := [name for name in OF_A_CLUSTER if ENVIRON.get(name, "").strip()]:
            log.warning(
                "%s set, but no ZMQTRAIN_ROLE: %s trains in this process alone",
                " and ".join(unused) + (" is" if len(unused) == 1 else " are"),
                entry,
            )
        return None
    name = Path(sys.argv[0]).name or entry
    given = {} if timing is None else timing.model_dump(exclude_unset=True)
    config = load_task(role, _variables(TaskConfig) | {"job": name} | given)
    if source == PROCESS_NAME and config.workers == 1 and not (config.ps or config.chief):
        return None  # the only process of its Procfile
    if found := list(_contradictions(config, workers, ps)):
        raise ConfigError(
            f"{entry} got {' and '.join(found)}, but {source} makes this process {config.task} of "
            f"a cluster; leave the argument out, or unset {source} to train in this process alone"
        )
    setup_logging(str(config.task), config.log_level, config.log_format)
    return config


def _contradictions(config: TaskConfig, workers: int | None, ps: int | None) -> Iterator[str]:
    if workers not in (None, config.workers):
        yield f"workers={workers}"
    if ps not in (None, len(config.ps)):
        yield f"ps={ps}"


def refuse_task(command: str) -> None:
    """Refuse to start a whole cluster in a process that is a task of another one.

    Raises:
        ConfigError: it is, or a variable has a mistake.
    """
    role, source = role_of_script()
    if role is not None and source != PROCESS_NAME:  # the name of a Procfile's line is anything
        raise ConfigError(
            f"{source} makes this process a {role} of a cluster, but {command} starts a whole one "
            "on this host; expected python -m zmqtrain.roles.task --job JOB for each task; or "
            f"unset {source}"
        )


def job_of_script(job: Job) -> Job:
    """Return the job of a script with the options in the variables of this process.

    Raises:
        ConfigError: a variable has a mistake.
        SystemExit: it has, and this process is a task; see :func:`mistakes_end_a_task`.
    """
    with mistakes_end_a_task():
        overrides = values_of(Job, _variables(Job))
        for text in mistyped(ENVIRON, TaskConfig, Job):
            log.warning("%s", text)
        return job.with_overrides(**overrides) if overrides else job


def _variables(model: type[BaseModel]) -> dict[str, Any]:
    """Return the options of a model as the variables of this process give them."""

    @click.command()
    @options_of(model, optional=True)
    def given(**values: Any) -> dict[str, Any]:
        return values

    try:
        return dict(given.main([], standalone_mode=False))
    except click.ClickException as error:
        raise ConfigError(error.format_message()) from None
