"""`zmqtrain submit` and `scale`: jobs on an engine that starts tasks."""

from __future__ import annotations

import contextlib
import re
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from zmqtrain.cli.ended import ended_job
from zmqtrain.cli.words import RecordedCommand, words_of
from zmqtrain.clusters.engine import Engine
from zmqtrain.clusters.engines import engine_named, engine_of
from zmqtrain.clusters.plan import LETTERS, SUFFIX_LENGTH, SubmitPlan, name_for, plan_of
from zmqtrain.clusters.submission import Submission
from zmqtrain.clusters.submitted import Submitted, directory_of, submitted_job
from zmqtrain.config.commands import command
from zmqtrain.config.job_file import load_job
from zmqtrain.config.options import names_of, option_of, options_of, values_of, variable_of
from zmqtrain.config.task import TaskConfig
from zmqtrain.errors import ConfigError, PeerLostError, ZmqTrainError
from zmqtrain.job import Job
from zmqtrain.transport.curve import make_keys
from zmqtrain.transport.keys import Owner, key_files, secret_name
from zmqtrain.units import counted

_name = click.argument("name")


@click.command("submit", cls=RecordedCommand, context_settings={"max_content_width": 100})
@click.argument("reference", metavar="JOB")
@options_of(Submission)
@option_of(TaskConfig, "keys", help="directory of keys for the job (default: new ones)")
@option_of(TaskConfig, "log_format", optional=True)
@click.option(
    "--env", "variables", multiple=True, metavar="NAME=VALUE", help="variable of every task"
)
@click.option(
    "--print",
    "is_printed",
    is_flag=True,
    help="print what would be submitted; manifests and scripts for ssh have secret keys, new ones "
    "unless --keys is given: keep them like a password",
)
@click.option(
    "--record",
    "is_recorded",
    is_flag=True,
    help="with --print: remember the job, which you apply by kubectl, kustomize or Helm",
)
@click.option("--dry-run", is_flag=True, help="have the engine check the job, but submit nothing")
@options_of(Job, optional=True)
@click.pass_context
def submit_command(
    context: click.Context, /, is_printed: bool, is_recorded: bool, dry_run: bool, **_: Any
) -> None:
    """Submit JOB to Kubernetes, Slurm, Ray, or hosts by ssh.

    JOB is file.py, file.py:name or package.module:name, also a script that calls Trainer.fit, as
    the tasks find it: on Kubernetes in the working directory of the image, elsewhere at the same
    path as here. It is loaded here, too, to compute the memory of the ps, unless --ps-memory is
    given. --logdir is pvc:CLAIM/PATH on Kubernetes, elsewhere a directory that chief and ps share.

    Afterwards top, why, logs, scale, stop and other commands take its name. The manifests and
    scripts for ssh that --print shows contain secret keys: keep them like a password.

    \b
    Examples:
      zmqtrain submit job.py --on kubernetes --image registry/image --logdir pvc:training/digits
      zmqtrain submit job.py --on slurm --ps 2 --workers 8 --max-workers 32 --memory 8Gi
      zmqtrain submit job.py --on ssh --hosts a:2,me@b:2 --logdir /data/job
      zmqtrain submit job.py --on ray --address head:6379 --workers 8 --logdir /data/job
      zmqtrain submit job.py --on kubernetes --as jobs --image registry/image --print
    """
    plan = planned(context)
    kind = engine_named(plan.asked.on)
    if is_recorded:
        if not is_printed or plan.asked.on != "kubernetes":
            raise ConfigError(
                "--record is given; expected it with --print and --on kubernetes; leave it out"
            )
        plan = _recorded(plan, kind.chosen(plan.asked), kind.rendered)[1]
    elif is_printed or dry_run:
        with tempfile.TemporaryDirectory() as temporary:
            plan = _with_keys(plan, Path(temporary) / "keys")
    else:
        submit_plan(plan)
        return
    if is_printed:
        sys.stdout.write(kind.rendered(plan))
    else:
        kind.chosen(plan.asked).check(plan, dry_run=True)
        click.echo(f"{plan.name} could be submitted; nothing was")


def planned(context: click.Context) -> SubmitPlan:
    """Return the plan that the words of `zmqtrain submit` describe.

    Raises:
        ConfigError: an option or the job has a mistake.
    """
    flags = context.params
    reference, keys = flags["reference"], flags["keys"]
    asked = Submission(**values_of(Submission, flags))
    asked.refuse_options_of_other_engines()
    overrides = values_of(Job, flags)
    name = asked.name or name_for(
        reference, [secrets.choice(LETTERS) for _ in range(SUFFIX_LENGTH)]
    )
    job = _loaded(reference, overrides) if asked.ps_memory is None else None
    logdir = overrides.pop("logdir", None if job is None else job.logdir)
    kept = Path(keys).absolute() if keys else directory_of(name) / "keys"
    plan = plan_of(
        asked,
        reference,
        job,
        name,
        overrides,
        logdir=logdir,
        keys_directory=str(kept),
        variables=_variables(flags["variables"], flags["log_format"]),
        working=str(Path.cwd()),
        words=words_of(context),
    )
    return _with_our_paths(plan) if engine_named(asked.on).has_our_paths else plan


def submit_plan(plan: SubmitPlan) -> None:
    """Submit a job, and show how it is watched and stopped.

    Raises:
        TakenError: a job of this name was submitted already.
        PeerLostError: a part of the job was submitted; its record stays.
        ZmqTrainError: the engine refuses it; nothing is left but the record of a former job.
    """
    with contextlib.chdir(plan.working):
        where = _submitted(plan, engine_named(plan.asked.on).chosen(plan.asked))
    click.echo(f"{plan.name} is submitted to {where}")
    click.echo(f"  watch it    zmqtrain top {plan.name}")
    click.echo(f"  stop it     zmqtrain stop {plan.name}")


@command("scale")
@_name
@click.option("--workers", type=click.IntRange(min=1), required=True, help="new number")
def scale_command(name: str, *, workers: int) -> None:
    """Change the number of workers of a submitted job.

    Surplus workers finish their steps and leave, so nothing is lost.

    \b
    Examples:
      zmqtrain scale digits-x7k2 --workers 48
      zmqtrain scale digits-x7k2 --workers 2
    """
    job = submitted_job(name)
    if not job.ps:
        raise ConfigError(
            f"{name} has no ps: each of its {job.workers} workers hosts a part of the parameters; "
            "stop it, and submit it with another number: it goes on from its checkpoint"
        )
    if workers > job.max_workers:
        raise ConfigError(
            f"--workers is {workers}; {name} has keys and memory for {job.max_workers}; expected "
            f"at most that; submit it again with a larger {names_of('max_workers')}"
        )
    if (ended := ended_job(job)) is not None:
        raise ConfigError(f"{ended.fact}; expected a running job; {ended.remedy}")
    engine_of(job).scale(job, workers)
    words = (*job.words, "--workers", str(workers)) if job.words else ()
    replace(job, workers=workers, words=words).save()
    click.echo(f"{name} will have {counted(workers, 'worker')}; it had {job.workers}")


def _submitted(plan: SubmitPlan, engine: Engine) -> str:
    """Submit a job, its record and keys first; return where it is."""
    job, plan = _recorded(plan, engine, partial(engine.check, dry_run=False))
    try:
        return engine.submit(plan)
    except BaseException as error:  # Ctrl-C, too
        _undo(job, engine, error)
        raise


def _recorded(
    plan: SubmitPlan, engine: Engine, check: Callable[[SubmitPlan], object]
) -> tuple[Submitted, SubmitPlan]:
    """Return the record of a new job, and the plan with its keys; leave nothing if ``check`` fails.

    Raises:
        TakenError: a job of this name was submitted already.
    """
    job = Submitted(
        name=plan.name,
        engine=plan.asked.on,
        job=plan.job,
        ps=plan.ps,
        workers=plan.workers,
        max_workers=plan.max_workers,
        keys=plan.keys_directory,
        kind=plan.asked.kind,
        context=engine.context,
        namespace=engine.namespace,
        words=plan.words,
        working=plan.working,
        logdir=plan.logdir or "",
        submitted_at=time.time(),
    )
    job.claim()
    try:
        job.save()
        plan = _with_keys(plan, Path(job.keys))
        check(plan)
    except BaseException:
        job.forget()
        raise
    return job, plan


def _undo(job: Submitted, engine: Engine, error: BaseException) -> None:
    """Remove the parts of a job that could not be submitted as a whole."""
    try:
        engine.remove(job)
    except ZmqTrainError as left:
        raise PeerLostError(
            f"{error or type(error).__name__}; parts of {job.name} could not be removed: "
            f"{left}; remove it with zmqtrain stop {job.name}"
        ) from None
    job.forget()


def _with_our_paths(plan: SubmitPlan) -> SubmitPlan:
    """Return a plan with the paths of this host."""
    path, colon, attribute = plan.job.partition(":")
    job = f"{Path(path).absolute()}{colon}{attribute}" if Path(path).exists() else plan.job
    logdir = str(Path(plan.logdir).absolute()) if plan.logdir else None
    python = plan.asked.python or sys.executable
    return replace(plan, job=job, logdir=logdir, python=python)


def _with_keys(plan: SubmitPlan, directory: Path) -> SubmitPlan:
    """Return a plan with the keys that the user has named, else with new ones in a directory."""
    counts = {"ps": plan.ps, "chief": 1, "worker": plan.max_workers, "client": 1}
    if Path(plan.keys_directory) == directory_of(plan.name) / "keys":
        make_keys(directory, counts)
    else:
        directory = Path(plan.keys_directory)
    files = key_files(directory)
    tasks = [(role, i) for role, count in counts.items() for i in range(count) if role != "client"]
    for role, index in tasks:
        if secret_name(Owner(role, index)) not in files:
            raise ConfigError(
                f"{directory} has no secret key of {role} {index}; expected one for each task; "
                f"make it by zmqtrain keys add {role} {index} --keys {directory}"
            )
    return replace(plan, keys=files)


def _loaded(reference: str, overrides: Mapping[str, Any]) -> Job:
    try:
        return load_job(reference, **overrides)
    except ZmqTrainError as error:
        raise ConfigError(
            f"{error}; to submit a job that cannot be loaded here, give {names_of('ps_memory')}"
        ) from None


def _variables(texts: tuple[str, ...], log_format: str | None) -> dict[str, str]:
    """Return the variables that every task gets by --env and --log-format."""
    pairs = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise ConfigError(
                f"--env is {text!r}; expected NAME=VALUE, with a name of letters, digits and _"
            )
        pairs[name] = value
    return pairs | ({variable_of("log_format"): log_format} if log_format else {})
