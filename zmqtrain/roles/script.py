"""A worker whose loop is the user's: it runs the job's file as a script, which attaches."""

from __future__ import annotations

import logging
from bdb import BdbQuit
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from zmqtrain.config.job_file import TrainFit, run_as_script, run_fit_script
from zmqtrain.errors import ConfigError, ExitCode, ZmqTrainError
from zmqtrain.hosting.task import OnStart
from zmqtrain.job import Job
from zmqtrain.observe.summary import Summary
from zmqtrain.user_code import described

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
    """
    global _task
    _task = task
    try:
        code = _exit_code_of(partial(run_as_script, reference), reference)
    finally:
        _task = None
    if not code and not task.is_attached:
        raise ConfigError(
            f"{reference} has a job with own_loop, but did not call zmqtrain.attach(job) when it "
            'was run as a script; expected the call below if __name__ == "__main__":'
        )
    return code


def run_fit(train: TrainFit, reference: str) -> int:
    """Run a script whose ``Trainer.fit`` calls ``train``; return the exit code.

    Raises:
        ConfigError: see :func:`run_fit_script`.
    """
    return _exit_code_of(partial(run_fit_script, reference, train), reference)


def _exit_code_of(run: Callable[[], None], reference: str) -> int:
    try:
        run()
    except ZmqTrainError:
        raise
    except BdbQuit as error:
        raise ConfigError(described(error)) from error
    except Exception:
        log.exception("the script %s failed", reference)
        return ExitCode.CRASH
    return ExitCode.OK
