"""The start of a task from its command line, `python -m zmqtrain.roles.<role>`."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import click
import uvloop

from zmqtrain.actors.task import JobActor
from zmqtrain.callbacks.history import History
from zmqtrain.chief.chief import Chief
from zmqtrain.compute.threads import limit_threads
from zmqtrain.config.cluster import IPC, Role, Task
from zmqtrain.config.commands import command, invoke
from zmqtrain.config.fit_script import ScriptEnd, is_fit_script
from zmqtrain.config.job_file import load_job
from zmqtrain.config.options import mistyped, options_of, values_of
from zmqtrain.config.task import ENVIRON, ROLE, TaskConfig, load_task, role_of_process
from zmqtrain.errors import ConfigError, ExitCode, ZmqTrainError
from zmqtrain.hints import host_error
from zmqtrain.hosting.actors import OnProgress
from zmqtrain.hosting.process import allow_descriptors, check_own_address, stop_on_signals
from zmqtrain.hosting.task import OnStart, serve
from zmqtrain.job import Job
from zmqtrain.observe.logs import setup_logging
from zmqtrain.observe.outcome import recorded
from zmqtrain.observe.summary import NotHere, Summary
from zmqtrain.planning.plan import Plan, plan_task
from zmqtrain.planning.strategy import task_under
from zmqtrain.roles import script

log = logging.getLogger(__name__)

OBJECTS = 20_000
"""New objects after which a task looks for garbage. A step with many tables makes thousands, and
nearly all are gone by its end; Python's own 700 would look at them several times in a step."""

_HELP = {
    None: """Run the task that --role, ZMQTRAIN_ROLE, TF_CONFIG or honcho names.

    The index may come from an engine: JOB_COMPLETION_INDEX, or Slurm's variables.

    \b
    Examples:
      python -m zmqtrain.roles.task --role worker --job job.py --ps a:2222,b:2222 --workers 4
    """,
    Role.PS: """Keep a shard of the parameters and apply updates to it.

    \b
    Examples:
      python -m zmqtrain.roles.ps --job examples/digits.py --workers 2
      python -m zmqtrain.roles.ps --job job.py --ps a:2222,b:2222 --index 1 --workers 4
    """,
    Role.WORKER: """Compute gradients and push them.

    \b
    Examples:
      python -m zmqtrain.roles.worker --job examples/digits.py --index 1 --workers 2
      python -m zmqtrain.roles.worker --job job.py --ps a:2222,b:2222 --index 3 --workers 4
      python -m zmqtrain.roles.worker --job job.py --ps 0 --workers a:2222,b:2222 --index 1
    """,
    Role.CHIEF: """Begin the job, watch it, evaluate, save, end it, and print its summary.

    \b
    Examples:
      python -m zmqtrain.roles.chief --job examples/digits.py --workers 2
    """,
}


def launch(role: Role | None, arguments: Sequence[str] | None = None) -> int:
    """Run one task from flags, variables and TF_CONFIG; return the process's exit code.

    ``role``: None for the one that --role, ZMQTRAIN_ROLE or TF_CONFIG names.
    """
    with contextlib.suppress(OSError, RuntimeError, AttributeError):  # stderr may be closed
        faulthandler.enable()  # shows where a model's compiled code crashed
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return invoke(_command(role), f"python -m zmqtrain.roles.{role or 'task'}", arguments)


def _command(of: Role | None) -> click.Command:
    @command(str(of or "task"), help=_HELP[of], context_settings={"max_content_width": 100})
    @options_of(TaskConfig)
    @options_of(Job, optional=True)
    def run(role: str | None = None, **flags: Any) -> int:
        named = of or (Role(role) if role else role_of_process()[0])
        if named is None:
            raise ConfigError(
                f"the role of this task is not given; expected {', '.join(Role)}; give --role (or "
                f"{ROLE}), or TF_CONFIG with a task section"
            )
        with contextlib.suppress(OSError):  # Linux only: the name in top and pgrep
            Path("/proc/self/comm").write_text(f"zmqtrain {named}")
        config = load_task(named, flags)
        setup_logging(str(config.task), config.log_level, config.log_format)
        return exit_code_of(partial(_load_and_run, config, flags))

    if of is None:
        kinds = click.Choice([str(role) for role in Role])
        run.params.insert(0, click.Option(["--role"], type=kinds, help="what this task does"))
    return run


def _load_and_run(config: TaskConfig, flags: Mapping[str, Any]) -> int:
    """Run the task of the job that its file describes; return the exit code."""
    if not any(ps.startswith(IPC) for ps in config.ps):  # zmqtrain run has warned
        for text in mistyped(ENVIRON, TaskConfig, Job):
            log.warning("%s", text)
    overrides = values_of(Job, flags)
    if "strategy" in overrides:  # a contradiction is found before the job is loaded
        task_under(overrides["strategy"], config.task, config.cluster)
    with _mistakes_recorded(config):
        if is_fit_script(config.job):
            return script.run_fit(partial(_fit, config), config.job, overrides)
        job = load_job(config.job, **overrides)
        own, plan = planned(config, job)
        if own.role is Role.WORKER and job.own_loop:
            task = script.ScriptTask(str(own.task), job, overrides, partial(train, config))
            return script.run(task, config.job)
    return _run(own, plan)


def _mistakes_recorded(config: TaskConfig) -> AbstractContextManager[None]:
    """Record an error of the block for the engine, if the end of this task is that of the job."""
    concludes = config.task == Task(Role.CHIEF if config.ps else Role.WORKER, 0)
    file = config.ended_file if concludes else None
    return recorded(config.job, None, file, lambda: None)


def _fit(config: TaskConfig, job: Job) -> Summary:
    """Run the task of a script's fit; only where the chief is does the script go on."""
    code, summary = train(config, job)
    if code or summary is None or not summary.has_parameters:
        raise ScriptEnd(code)
    return summary


def planned(config: TaskConfig, job: Job) -> tuple[TaskConfig, Plan]:
    """Return which task of the job's plan this is, and the plan; log under that task's name.

    From now on this process has the task's limit of threads.

    Raises:
        ConfigError: the job cannot be trained by this cluster.
    """
    with _mistakes_recorded(config):
        own, plan = plan_task(config, job)
    if own.task != config.task:
        setup_logging(str(own.task), config.log_level, config.log_format)
        log.info("%s of TF_CONFIG is %s here: the chief computes, too", config.task, own.task)
    if config.threads is not None:
        limit_threads(config.threads)
    gc.freeze()  # loaded objects stay: collecting garbage among them delays steps
    gc.set_threshold(OBJECTS)
    return own, plan


@script.process_restored()
def train(
    config: TaskConfig,
    job: Job,
    on_start: OnStart = stop_on_signals,
    on_progress: OnProgress | None = None,
) -> tuple[int, Summary | None]:
    """Run the task of a script, which may be one with fit, to its end, and log errors.

    Return the exit code, and the job's summary if the task learns it.
    """
    actors: list[JobActor] = []
    more: dict[str, Any] = {"actors": actors, "on_progress": on_progress}
    code = exit_code_of(lambda: _run(*planned(config, job), on_start, **more))
    return code, _summary_among(actors)


def _run(config: TaskConfig, plan: Plan, on_start: OnStart = stop_on_signals, **more: Any) -> int:
    holds_shard = plan.shard_of(config.task) is not None
    allow_descriptors(plan.shards + holds_shard * plan.most_workers)
    check_own_address(config, plan)
    return uvloop.run(serve(config, plan, on_start, **more))


def _summary_among(actors: Sequence[JobActor]) -> Summary | None:
    """Return the summary of an ended job, from its chief or from what the chief has sent."""
    for actor in actors:
        if isinstance(actor, Chief):
            return actor.summary
        if actor.end is not None and actor.end.summary:
            fields = json.loads(actor.end.summary)
            fields |= {"history": History.of(fields["history"]), "parameters": NotHere()}
            return Summary(**fields | {"evaluations": (*fields["evaluations"],)})
    return None


def exit_code_of(run: Callable[[], int]) -> int:
    """Return the exit code of a task that ``run`` runs to its end; log its error."""
    try:
        return run()
    except Exception as error:
        mistake = error if isinstance(error, ZmqTrainError) else host_error(error)
        if mistake is None:
            log.exception("this is a bug in zmqtrain or in a plug-in")
            return ExitCode.CRASH
        log.debug("ended by", exc_info=True)
        log.error("%s", mistake)
        return mistake.exit_code
