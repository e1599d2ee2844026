"""The task of a cluster that the process of a script is, by its variables, or none.

``Trainer.fit``, ``zmqtrain.run`` and ``zmqtrain.attach`` all read the variables here.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

import click
from pydantic import BaseModel

from zmqtrain.config.fit_script import fit_in_script
from zmqtrain.config.options import mistyped, options_of, values_of
from zmqtrain.config.resolvers.honcho import PROCESS_NAME
from zmqtrain.config.task import ENVIRON, OF_A_CLUSTER, TaskConfig, load_task, role_of_script
from zmqtrain.config.timing import Timing
from zmqtrain.errors import ConfigError, RunFailedError
from zmqtrain.hosting.task import IN_A_TASK
from zmqtrain.job import Job
from zmqtrain.observe.logs import setup_logging
from zmqtrain.roles import script

log = logging.getLogger(__name__)


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
    script.refuse_in_a_loop(entry)
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
        is_script = script.current_task() is not None or fit_in_script() is not None
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
