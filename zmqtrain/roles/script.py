"""Tasks that run a script of the user's: one that attaches with its own loop, or calls fit."""

from __future__ import annotations

import gc
import logging
from bdb import BdbQuit
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from zmqtrain.compute.threads import limit_restored
from zmqtrain.config.fit_script import ScriptEnd, TrainFit, run_fit_script
from zmqtrain.config.loading import run_as_script
from zmqtrain.errors import ConfigError, ExitCode, RunFailedError, ZmqTrainError
from zmqtrain.hosting import signals
from zmqtrain.hosting.task import OnStart
from zmqtrain.job import Job
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


def refuse_in_a_loop(entry: str) -> None:
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

    ``train`` restores what it changes of the process, see :func:`process_restored`.
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
            job = job.with_overrides(**overrides)
            summary = train(job)
            if summary.exit_code == ExitCode.OK:
                trained.append((summary, job.logdir))
            return summary

        try:
            with _failures_shown(reference):
                run_fit_script(reference, fit)
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
