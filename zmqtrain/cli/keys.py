"""`zmqtrain keys`: the keys with which tasks authenticate."""

from __future__ import annotations

import time
from pathlib import Path

import click

from zmqtrain.cli.output import cell, show_result, table
from zmqtrain.clusters.engines import engine_named, engine_of
from zmqtrain.clusters.submitted import submitted_job, submitted_jobs
from zmqtrain.config.cluster import Role
from zmqtrain.config.commands import Group
from zmqtrain.config.options import names_of, option_of
from zmqtrain.config.task import TaskConfig
from zmqtrain.errors import ConfigError
from zmqtrain.transport.curve import make_keys, make_pair
from zmqtrain.transport.keys import (
    ALLOWED,
    REGISTRY,
    Owner,
    Pair,
    add_keys,
    owner_of,
    public_key,
    read_registry,
    revoke_key,
    rotation,
    secrets_in,
)
from zmqtrain.units import NOTHING, counted, duration

_keys_option = option_of(TaskConfig, "keys", help="directory of keys; required")
_role_argument = click.argument("role", metavar="ps|chief|worker|client")


@click.group("keys", cls=Group)
def keys_command() -> None:
    """Make and manage the keys with which tasks authenticate.

    With keys (--keys DIR or ZMQTRAIN_KEYS, on every task) each tcp connection is encrypted, and
    each task has a key of its own. Commands such as zmqtrain status use the key of a client.

    DIR contains the registry of all keys, and secrets. Copy the registry to every host, and to each
    host the secrets of its own tasks. A running ps reads a changed registry again.

    \b
    Examples:
      zmqtrain keys new --keys DIR --ps 2 --workers 4
      zmqtrain keys add worker 4 --keys DIR
      zmqtrain keys revoke worker 2 --keys DIR
      zmqtrain keys rotate digits-x7k2      # a submitted job
      zmqtrain keys list --keys DIR
    """


@keys_command.command("new")
@_keys_option
@click.option("--ps", type=click.IntRange(0, 4096), default=1, show_default=True, help="how many")
@click.option(
    "--workers", type=click.IntRange(1, 65536), default=1, show_default=True, help="how many"
)
@click.option(
    "--clients",
    type=click.IntRange(0, 4096),
    default=1,
    show_default=True,
    help="how many clients, for commands such as zmqtrain status",
)
def new_command(*, keys: str | None, ps: int, workers: int, clients: int) -> None:
    """Make a directory with a key for every task of a job.

    \b
    Examples:
      zmqtrain keys new --keys ~/job-keys --ps 2 --workers 4
    """
    directory = _directory(keys)
    if (directory / REGISTRY).exists():
        raise ConfigError(
            f"{directory} already has keys; expected a new directory; add single keys with "
            "zmqtrain keys add"
        )
    counts = {"ps": ps, "chief": 1, "worker": workers, "client": clients}
    made = make_keys(directory, counts)
    click.echo(
        f"{counted(made, 'key')} in {directory}: copy {REGISTRY} to every host, and to each host "
        "the *.secret files of its own tasks"
    )


@keys_command.command("add")
@_role_argument
@click.argument("index", type=int, default=0)
@_keys_option
@click.option("--public", metavar="KEY", help="allow this public key; its secret stays elsewhere")
def add_command(*, role: str, index: int, keys: str | None, public: str | None) -> None:
    """Allow a key for a task, and print the public key.

    Without --public a new pair is made, and its secret is stored in DIR.

    \b
    Examples:
      zmqtrain keys add worker 4 --keys DIR
      zmqtrain keys add client 1 --keys DIR --public 8f3a...
    """
    owner = owner_of(role, index)
    pair = make_pair() if public is None else Pair(public_key(public), None)
    add_keys(_directory(keys), {owner: pair})
    click.echo(pair.public)
    _tell_what_is_left(_directory(keys))


@keys_command.command("revoke")
@_role_argument
@click.argument("index", type=int, required=False)
@_keys_option
def revoke_command(*, role: str, index: int | None, keys: str | None) -> None:
    """Revoke the key of a task.

    INDEX may be omitted for the chief. Every ps that uses this registry closes the task's
    connection within seconds. Copy the registry to the other hosts.

    \b
    Examples:
      zmqtrain keys revoke worker 2 --keys DIR
    """
    owner = owner_of(role, index)
    public = revoke_key(_directory(keys), owner)
    click.echo(f"the key of {owner} ({public}) is revoked")
    _tell_what_is_left(_directory(keys))


def _tell_what_is_left(directory: Path, but: str = "") -> None:
    """Name the submitted jobs with copies of this registry, and how to send the changed one.

    ``but``: the job that has it already.
    """
    for job in submitted_jobs():
        engine = engine_named(job.engine)
        is_of_job = Path(job.keys).absolute() == directory.absolute() and job.name != but
        if not is_of_job or engine.reads_our_keys:
            continue
        if job.ps and engine.rotates_keys:
            then = f"bring them this one with zmqtrain keys rotate {job.name}"
        else:
            then = "stop it, and submit it again: it goes on from its checkpoint"
        click.echo(f"the tasks of {job.name} still have the former registry; {then}", err=True)


@keys_command.command("rotate")
@click.argument("name")
def rotate_command(*, name: str) -> None:
    """Give workers, chief and clients of a submitted job new keys while it runs.

    The command also sends the tasks the registry, with what was revoked or added in the job's
    directory of keys (see zmqtrain jobs --json). Supervisors restart the tasks with new keys within
    seconds; nothing is lost.

    The former keys stay valid until all tasks have the new ones, on Kubernetes for two minutes. An
    interrupted rotation leaves both valid: repeat the command to complete it.

    The ps keep their keys, by which the other tasks recognise them. On Ray, and without ps, all
    tasks keep theirs.

    \b
    Examples:
      zmqtrain keys rotate digits-x7k2
    """
    job = submitted_job(name)
    engine, directory = engine_of(job), Path(job.keys)
    if not job.ps or not engine.rotates_keys:
        raise ConfigError(
            f"{name} is {'on Ray' if job.ps else 'without ps'}; expected a job whose keys can "
            "change; stop it, and submit it again: it goes on from its checkpoint, with new keys"
        )
    with rotation(directory, lambda: _new_pairs(directory)) as owners:
        engine.send_keys(job)
        if engine.keys_arrive_s:
            waits = duration(engine.keys_arrive_s)
            click.echo(
                f"the new keys are sent; this command revokes the former ones in {waits}; repeat "
                "it if it is interrupted"
            )
        time.sleep(engine.keys_arrive_s)
    engine.send_keys(job)
    click.echo(f"{len(owners)} tasks and clients of {name} have new keys")
    _tell_what_is_left(directory, but=name)


def _new_pairs(directory: Path) -> dict[Owner, Pair]:
    """Return new keys for all tasks and clients with a secret here, except for the ps."""
    return {owner: make_pair() for owner in secrets_in(directory) if owner.role != Role.PS}


@keys_command.command("list")
@_keys_option
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def list_command(*, keys: str | None, as_json: bool) -> None:
    """List the keys and which of them are revoked.

    \b
    Examples:
      zmqtrain keys list --keys DIR
      zmqtrain keys list --json | jq '.keys[] | select(.revoked)'
    """
    directory = _directory(keys)
    entries = read_registry(directory)
    held = set(secrets_in(directory))
    known, rows = [], []
    for entry in entries:
        owner, secret = entry.owner, entry.state == ALLOWED and entry.owner in held
        known.append(
            {
                "role": owner.role,
                "index": owner.index,
                "revoked": entry.revoked,
                "secret": secret,
                "public": entry.public,
            }
        )
        state = cell(entry.state, "red" if entry.revoked else "")
        rows.append((owner, state, "here" if secret else NOTHING, entry.public))
    view = table("task", "state", "secret", "public key", rows=rows, folded=("public key",))
    show_result({"directory": str(directory), "keys": known}, view, as_json=as_json)


def _directory(keys: str | None) -> Path:
    if keys is None:
        raise ConfigError(f"{names_of('keys')} is not given; expected the directory of keys")
    return Path(keys)
