"""`zmqtrain submit`, `jobs`, `logs` and `scale`: jobs on an engine that starts tasks."""

from __future__ import annotations

import re
import secrets
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from zmqtrain.cli.output import cell, show, show_json, table
from zmqtrain.clusters.engine import Engine
from zmqtrain.clusters.engines import engine_named, engine_of
from zmqtrain.clusters.plan import LETTERS, SUFFIX_LENGTH, SubmitPlan, name_for, plan_of
from zmqtrain.clusters.submission import Submission
from zmqtrain.clusters.submitted import (
    Submitted,
    directory_of,
    is_over,
    submitted_job,
    submitted_jobs,
)
from zmqtrain.config.cluster import Role, Task
from zmqtrain.config.help import command
from zmqtrain.config.job_file import load_job
from zmqtrain.config.options import names_of, option_of, options_of, values_of
from zmqtrain.config.task import TaskConfig
from zmqtrain.errors import ConfigError, PeerLostError, ZmqTrainError
from zmqtrain.job import Job
from zmqtrain.transport.curve import make_keys
from zmqtrain.transport.keys import Owner, key_files, secret_name
from zmqtrain.units import counted

SHOWN_STATE = 120  # letters of a state in a table, or one job could fill the screen
ANSWER_S = 15.0
"""How long zmqtrain jobs waits for the engines."""

_name = click.argument("name")


@command("submit", context_settings={"max_content_width": 100})
@click.argument("reference", metavar="JOB")
@options_of(Submission)
@option_of(TaskConfig, "keys", help="directory of keys for the job (default: new ones)")
@click.option(
    "--env", "variables", multiple=True, metavar="NAME=VALUE", help="variable of every task"
)
@click.option("--print", "is_printed", is_flag=True, help="print what would be submitted")
@click.option("--dry-run", is_flag=True, help="let the engine check the job, but submit nothing")
@options_of(Job, optional=True)
def submit_command(
    reference: str,
    keys: str | None,
    variables: tuple[str, ...],
    is_printed: bool,
    dry_run: bool,
    **flags: Any,
) -> None:
    """Submit JOB to Kubernetes, Slurm, Ray, or hosts by ssh.

    JOB is file.py, file.py:name or package.module:name, as the tasks find it: on Kubernetes in the
    working directory of the image, else at the same path as here. It is loaded here, too, to learn
    the memory of the ps; with --ps-memory it is not. On Kubernetes --logdir is pvc:CLAIM/PATH, else
    a directory that chief and ps share.

    The commands status, why, logs, scale, policy, save and stop then take the job's name.

    With --print the manifests or scripts go to stdout, and nothing else happens. Those for
    Kubernetes and ssh hold the job's secret keys, new ones each time unless --keys is given: keep
    them like a password. Without --print keys are not shown.

    \b
    Examples:
      zmqtrain submit job.py --on kubernetes --image registry/image --logdir pvc:training/digits
      zmqtrain submit job.py --on slurm --ps 2 --workers 8 --max-workers 32 --memory 8Gi
      zmqtrain submit job.py --on ssh --hosts a:2,me@b:2 --logdir /data/job
      zmqtrain submit job.py --on ray --address head:6379 --workers 8 --logdir /data/job
      zmqtrain submit job.py --on kubernetes --as jobs --image registry/image --print
    """
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
        variables=_pairs(variables),
    )
    kind = engine_named(asked.on)
    if kind.has_our_paths:
        plan = _with_our_paths(plan)
    if is_printed or dry_run:
        with tempfile.TemporaryDirectory() as temporary:
            held = kept if keys else _new_keys(Path(temporary) / "keys", plan)
            plan = replace(plan, keys=_texts(held, plan))
        if is_printed:
            sys.stdout.write(kind.rendered(plan))
            return
        kind.chosen(asked).check(plan, dry_run=True)
        click.echo(f"{name} could be submitted; nothing was")
        return
    click.echo(f"{name} is submitted to {_submitted(plan, kind.chosen(asked), keys)}")
    click.echo(f"  watch it    zmqtrain top {name}")
    click.echo(f"  stop it     zmqtrain stop {name}")


@command("jobs")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def jobs_command(*, as_json: bool) -> None:
    """List the jobs that you have submitted.

    \b
    Examples:
      zmqtrain jobs
      zmqtrain jobs --json | jq -r '.jobs[] | select(.state != "completed") | .name'
    """
    jobs = submitted_jobs()
    states = states_of(jobs, lambda job: engine_of(job).state(job))
    rows = [asdict(job) | {"state": states[job.name]} for job in jobs]
    if as_json:
        show_json({"jobs": rows})
        return
    headings = ("name", "engine", "where", "job", "ps", "workers", "state")
    for row in rows:
        row["where"] = "/".join(filter(None, (row["context"], row["namespace"])))
        row["state"] = textwrap.shorten(row["state"], SHOWN_STATE, placeholder=" ...")
    cells = [[row[heading] for heading in headings] for row in rows]
    shown = table(*headings, rows=cells, folded=("state",))
    show(shown if rows else cell("no job was submitted"))


@command("logs")
@_name
@click.argument("task", metavar="TASK")
@click.option("-f", "--follow", is_flag=True, help="go on until Ctrl-C")
def logs_command(name: str, task: str, *, follow: bool) -> None:
    """Print the log of a task of a submitted job.

    TASK is chief, ps=0, worker=3.

    \b
    Examples:
      zmqtrain logs digits-x7k2 chief
      zmqtrain logs digits-x7k2 worker=3 -f
    """
    role, equals, index = task.partition("=")
    if role not in set(Role) or (equals and not re.fullmatch("[0-9]{1,9}", index)):
        raise ConfigError(f"TASK is {task!r}; expected one such as chief, ps=0 or worker=3")
    job = submitted_job(name)
    engine_of(job).logs(job, Task(Role(role), int(index or 0)), follow=follow)


@command("scale")
@_name
@click.option("--workers", type=click.IntRange(min=1), required=True, help="how many workers")
def scale_command(name: str, *, workers: int) -> None:
    """Change the number of workers of a submitted job.

    Surplus workers finish their steps and leave; nothing is lost.

    \b
    Examples:
      zmqtrain scale digits-x7k2 --workers 48
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
            f"at most that; submit it anew with a larger {names_of('max_workers')}"
        )
    engine = engine_of(job)
    if is_over(state := engine.state(job)):
        raise ConfigError(
            f"{name} is {state}; expected a job that runs; stop it, and submit it again: it goes "
            "on from its checkpoint"
        )
    engine.scale(job, workers)
    replace(job, workers=workers).save()
    click.echo(f"{name} will have {counted(workers, 'worker')}; it had {job.workers}")


def _submitted(plan: SubmitPlan, engine: Engine, keys: str | None) -> str:
    """Submit a job, its record and keys first; return where it is. ``keys``: None: new ones.

    Raises:
        ConfigError: a job of this name was submitted already.
        PeerLostError: a part of the job was submitted; its record stays.
        ZmqTrainError: the engine refuses it; nothing is left.
    """
    counts = plan.ps, plan.workers, plan.max_workers
    where = plan.asked.kind, engine.context, engine.namespace
    job = Submitted(plan.name, plan.asked.on, plan.job, *counts, plan.keys_directory, *where)
    job.claim()
    try:
        job.save()
        kept = Path(job.keys)
        if keys is None:
            _new_keys(kept, plan)
        plan = replace(plan, keys=_texts(kept, plan))
        engine.check(plan, dry_run=False)
    except BaseException:
        job.forget()
        raise
    try:
        return engine.submit(plan)
    except BaseException as error:  # Ctrl-C, too
        _undo(job, engine, error)
        raise


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
    return replace(plan, job=job, logdir=logdir, python=python, working=str(Path.cwd()))


def _new_keys(directory: Path, plan: SubmitPlan) -> Path:
    make_keys(directory, _keys_of(plan))
    return directory


def _keys_of(plan: SubmitPlan) -> dict[str, int]:
    """Return the number of keys for each role, and for clients."""
    return {"ps": plan.ps, "chief": 1, "worker": plan.max_workers, "client": 1}


def _texts(keys: Path, plan: SubmitPlan) -> dict[str, str]:
    """Return the files of a directory of keys."""
    files = key_files(keys)
    for role, count in _keys_of(plan).items():
        for index in range(count):
            if role != "client" and secret_name(Owner(role, index)) not in files:
                raise ConfigError(
                    f"{keys} has no secret key of {role} {index}; expected one for each task; make "
                    f"it by zmqtrain keys add {role} {index} --keys {keys}"
                )
    return files


def _loaded(reference: str, overrides: Mapping[str, Any]) -> Job:
    try:
        return load_job(reference, **overrides)
    except ZmqTrainError as error:
        raise ConfigError(
            f"{error}; to submit a job that cannot be loaded here, give {names_of('ps_memory')}"
        ) from None


def _pairs(texts: tuple[str, ...]) -> dict[str, str]:
    pairs = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise ConfigError(
                f"--env is {text!r}; expected NAME=VALUE, with a name of letters, digits and _"
            )
        pairs[name] = value
    return pairs


def states_of(
    jobs: Sequence[Submitted], ask: Callable[[Submitted], str], limit_s: float = ANSWER_S
) -> dict[str, str]:
    """Ask for the states of all jobs at once, and return those that arrive in time, by name."""
    states = {job.name: f"unknown: no answer within {limit_s:g} s" for job in jobs}

    def note(job: Submitted) -> None:
        try:
            states[job.name] = ask(job)
        except ZmqTrainError as error:
            states[job.name] = f"unknown: {error}"

    # Daemons: this process ends without those that wait.
    threads = [threading.Thread(target=note, args=(job,), daemon=True) for job in jobs]
    until = time.monotonic() + limit_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return dict(states)
