"""Which running job a command is about, and how it is asked."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import click

from zmqtrain.actors.client import ask
from zmqtrain.cli.numbers import seconds_type
from zmqtrain.config.cluster import Role
from zmqtrain.config.options import given, load, names_of
from zmqtrain.config.run_file import RunningJob, running_jobs
from zmqtrain.config.task import ENVIRON, TF_CONFIG, TaskConfig
from zmqtrain.config.tf_config import parse_tf_config
from zmqtrain.errors import ConfigError, ProtocolError
from zmqtrain.transport.keys import Owner, secrets_in
from zmqtrain.transport.security import Security
from zmqtrain.wire.messages import GetStatus, Message, Status

TIMEOUT_S = 5.0
CLIENT = Owner("client")

Reply = TypeVar("Reply", bound=Message)


@dataclass(frozen=True, slots=True)
class RemoteJob:
    """A running job, reached by the address of its ps 0.

    ``name`` is the job file as its tasks were given it, "" unless chief or ps 0 is on this host.
    """

    address: str
    name: str
    timeout_s: float = TIMEOUT_S
    security: Security = field(default_factory=Security)

    def status(self, seen: int = 0, wait_s: float = 0.0) -> Status:
        """Return the job's status after ``wait_s``, or as soon as its event is past ``seen``.

        Raises:
            PeerLostError: ps 0 does not answer in time.
            ProtocolError: what answers is no ps 0.
        """
        return self.ask(GetStatus(seen, wait_s), Status, wait_s + self.timeout_s)

    def ask(self, message: Message, expected: type[Reply], timeout_s: float) -> Reply:
        """Send a request to ps 0 and return its reply.

        Raises:
            PeerLostError: ps 0 does not answer in time.
            ProtocolError: what answers is no ps 0.
            RefusedError, CheckpointError, ...: ps 0 refused, with its reason.
        """
        try:
            reply = ask(self.address, message, timeout_s=timeout_s, security=self.security)
        except ProtocolError as error:
            raise ProtocolError(
                f"what answers at {self.address} is no ps 0 of this version ({error}); expected "
                f"the first of the job's ps; give its address by {names_of('ps')}"
            ) from None
        if not isinstance(reply, expected):
            raise ProtocolError(f"{self.address} answered {message} with {reply}")
        return reply

    def has_ended(self) -> bool:
        """Return whether chief and ps 0, which were seen on this host, run no more."""
        return self.name != "" and not _named(self.address)


def find_job(
    ps: str | None,
    timeout_s: float = TIMEOUT_S,
    environ: Mapping[str, str] = ENVIRON,
    keys: str | None = None,
    insecure: bool | None = None,
) -> RemoteJob:
    """Return the job meant by ``--ps``, ZMQTRAIN_PS or TF_CONFIG, else the one of this host.

    Raises:
        ConfigError: an address is wrong, or it is not clear which job is meant.
    """
    address = _address_given(ps, environ)
    if address is not None:
        name = _named(address)
    else:
        jobs = running_jobs()
        if len(jobs) != 1:
            raise ConfigError(_which(jobs))
        address, name = jobs[0].ps[0], jobs[0].job
    flags = {"keys": keys, "insecure": insecure}
    return RemoteJob(address, name, timeout_s, _security(address, flags, environ))


def about_a_job(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the function of a command: it gets a :class:`RemoteJob` as its first argument."""

    @functools.wraps(command)
    def run(
        *, ps: str | None, timeout_s: float, keys: str | None, insecure: bool | None, **options: Any
    ) -> Any:
        job = find_job(ps, timeout_s, keys=keys, insecure=insecure)
        return command(job, **options)

    run = click.option(
        "--timeout-s",
        type=seconds_type,
        default=TIMEOUT_S,
        metavar="NUMBER",
        show_default=True,
        help="seconds to wait for an answer of ps 0",
    )(run)
    run = click.option(
        "--insecure",
        is_flag=True,
        default=None,
        help="connect beyond this host without keys (or ZMQTRAIN_INSECURE)",
    )(run)
    run = click.option(
        "--keys",
        metavar="DIR",
        help="directory with the key of a client and the job's registry (or ZMQTRAIN_KEYS)",
    )(run)
    return click.option(
        "--ps",
        metavar="ADDRESSES",
        help="address of ps 0, or of all ps, as host:port,host:port (or ZMQTRAIN_PS, or "
        "TF_CONFIG; if none is given, the one job that runs on this host)",
    )(run)


def _address_given(ps: str | None, environ: Mapping[str, str]) -> str | None:
    said = given(TaskConfig, {"ps": ps}, environ)
    if "ps" in said:
        values: dict[str, Any] = {"role": Role.WORKER, "job": "of no matter"}
        values |= {name: said[name] for name in ("ps", "base_port") if name in said}
        return load(TaskConfig, values).ps[0]
    cluster, _ = parse_tf_config(environ.get(TF_CONFIG, ""))
    return cluster.ps[0] or None if cluster is not None and cluster.ps else None


def _security(address: str, flags: Mapping[str, Any], environ: Mapping[str, str]) -> Security:
    """Return how ps 0 is talked to: with the first key of a client that is at hand."""
    said = given(TaskConfig, flags, environ)
    values: dict[str, Any] = {"role": Role.WORKER, "job": "of no matter", "ps": address}
    values |= {name: said[name] for name in flags if name in said}
    security = load(TaskConfig, values).security
    held = [] if security.directory is None else secrets_in(security.directory)
    clients = [owner for owner in held if owner.role == CLIENT.role]
    return replace(security, owner=min(clients, default=CLIENT))


def _named(address: str) -> str:
    """Return the name of the job at this address, "" if none of this host has it."""
    with contextlib.suppress(ConfigError):  # it is a name only: the address is known
        for job in running_jobs():
            if address in job.ps[:1]:
                return job.job
    return ""


def _which(jobs: list[RunningJob]) -> str:
    if not jobs:
        return (
            "no job of yours has its chief or ps 0 on this host; if they run elsewhere, or have "
            f"not started, give the address of the job's ps 0 by {names_of('ps')}"
        )
    width = max(len(job.ps[0]) for job in jobs)
    listing = "".join(
        f"\n  --ps {job.ps[0]:<{width}}  {job.job} ({job.task}: process {job.pid})" for job in jobs
    )
    return f"{len(jobs)} jobs run on this host; say which one is meant:{listing}"
