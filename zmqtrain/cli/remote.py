"""Finding a running job, and sending requests to it."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import compress
from pathlib import Path
from typing import Any, TypeVar

import click

from zmqtrain.actors.client import ask
from zmqtrain.actors.halts import halt_at
from zmqtrain.cli.ended import EndedJob, ended_in, ended_job
from zmqtrain.clusters.engines import engine_of
from zmqtrain.clusters.submitted import Submitted, submitted_job
from zmqtrain.config.cluster import Role, connect_endpoint
from zmqtrain.config.commands import seconds_option
from zmqtrain.config.options import names_of, option_of, values_of
from zmqtrain.config.resolvers.tf_config import TF_CONFIG, TfConfig, read_tf_config
from zmqtrain.config.run_file import RunningJob, running_jobs
from zmqtrain.config.task import ENVIRON, TaskConfig
from zmqtrain.errors import (
    ConfigError,
    NotRunningError,
    PeerLostError,
    ProtocolError,
    RefusedError,
    ZmqTrainError,
)
from zmqtrain.protocol.status import Status
from zmqtrain.store.checkpoint import checkpoints_directory
from zmqtrain.store.logdir import is_claim_seen
from zmqtrain.transport.keys import Owner, read_registry, secrets_in
from zmqtrain.transport.security import Security
from zmqtrain.wire.control import GetStatus
from zmqtrain.wire.messages import Message

TIMEOUT_S = 5.0
MOST_ASKED = 32  # at once
CLIENT = Owner("client")

OPTIONS = {
    "ps": "address of ps 0, or of all ps, or of all workers of a job without ps, as host:port,"
    "host:port (default: from TF_CONFIG, else the one job that runs on this host)",
    "base_port": None,
    "keys": "directory with a client's key and the job's registry",
    "insecure": "connect without keys to a job that runs with --insecure; any process that "
    "listens at its address is trusted",
}
"""The options that find a job, with their help where it differs from that of a task."""

Reply = TypeVar("Reply", bound=Message)


@dataclass(frozen=True, slots=True)
class RemoteJob:
    """A running job, reached by the address of its ps 0.

    ``name``: of a submitted job its name; else the job file as on the tasks' command line, if chief
    or ps 0 is on this host. ``submitted``: the job on its engine. ``unreachable``: the error if it
    cannot be reached. ``ended``: how it ended, if it is over.
    """

    address: str
    name: str
    timeout_s: float = TIMEOUT_S
    security: Security = field(default_factory=Security)
    submitted: Submitted | None = None
    unreachable: ZmqTrainError | None = None
    ended: EndedJob | None = None

    def status(self, seen: int = 0, wait_s: float = 0.0) -> Status:
        """Return the job's status after ``wait_s``, or as soon as its event is past ``seen``.

        Raises:
            PeerLostError: ps 0 does not answer in time.
            ProtocolError: another program than a ps 0 answers.
        """
        return self.ask(GetStatus(seen, wait_s), Status, wait_s + self.timeout_s)

    def ask(self, message: Message, expected: type[Reply], timeout_s: float) -> Reply:
        """Send a request to ps 0 and return its reply.

        Raises:
            PeerLostError: ps 0 does not answer in time.
            ProtocolError: another program than a ps 0 answers.
            RefusedError, CheckpointError, ...: ps 0 refused, with its reason.
        """
        if self.ended is not None:
            raise PeerLostError(self.ended.sentence())
        if self.unreachable is not None:
            raise type(self.unreachable)(f"{self.unreachable}; see zmqtrain why {self.name}")
        try:
            reply = ask(self.address, message, timeout_s=timeout_s, security=self.security)
        except PeerLostError as error:
            if not self.name or self.submitted is not None or halt_at(self.address):
                raise
            raise PeerLostError(
                f"{error}; {self.name} runs on this host, and its ps 0 is still starting or has "
                "died: ask again, or wait longer with --timeout-s"
            ) from None
        except ProtocolError as error:
            raise ProtocolError(
                f"{self.address} is not a ps 0 of this version ({error}); expected the first of "
                "the job's ps or, without ps, the lowest worker that is left; give its address "
                f"with {names_of('ps')}"
            ) from None
        if not isinstance(reply, expected):
            raise ProtocolError(f"{self.address} answered {message} with {reply}")
        return reply

    @property
    def chief_metrics(self) -> str:
        """The address at which its chief serves metrics, "" if it is not on this host."""
        return next((job.metrics for job in running_jobs() if self.address in job.ps[:1]), "")

    def spent(self) -> Mapping[str, float]:
        """Return the tasks of a `zmqtrain run` here that have no restart left, and until when."""
        return next((job.spent for job in running_jobs() if self.address in job.ps[:1]), {})

    def has_ended(self) -> bool:
        """Return whether the job is over: on its engine, or its chief and ps 0 on this host."""
        if self.submitted is not None:
            return ended_job(self.submitted) is not None
        return self.name != "" and not _name_of(self.address)


def find_job(
    flags: Mapping[str, Any], timeout_s: float = TIMEOUT_S, environ: Mapping[str, str] = ENVIRON
) -> RemoteJob:
    """Return the job that the option ps or TF_CONFIG names, else the one on this host.

    ``flags``: the values of the options in OPTIONS.

    Raises:
        ConfigError: an address is wrong, or it is not clear which job is meant.
    """
    values = values_of(TaskConfig, flags)
    found: tuple[str, ...] = ()
    if "ps" not in values:
        found = _leaders_of(read_tf_config(environ.get(TF_CONFIG, "")))
        if not found:
            running = running_jobs()
            if len(running) != 1:
                raise ConfigError(_which(running))
        values["ps"] = found or running[0].ps
    config = TaskConfig(role=Role.WORKER, job="not asked for", **values)
    if not config.ps:
        raise ConfigError(f"{names_of('ps')} is 0; expected the address of the job's ps 0")
    hosted = len(found) > 1 or _is_hosted(config)
    leaders = config.ps if hosted else config.ps[:1]
    role = Role.WORKER if hosted else Role.PS
    servers = {
        connect_endpoint(address): Owner(role, index) for index, address in enumerate(leaders)
    }
    security = _as_client(config.security(CLIENT, servers))
    jobs = [RemoteJob(address, _name_of(address), timeout_s, security) for address in leaders]
    return _leading(jobs) if len(jobs) > 1 else jobs[0]


def _leading(jobs: Sequence[RemoteJob]) -> RemoteJob:
    """Return the first that leads its job: without ps that is the lowest worker that is left.

    The others are asked in parallel, so that many lost workers take no more time than one. If none
    leads, the first is returned: its answer has the reason.
    """
    first, *others = jobs
    if _leads(first):
        return first
    with ThreadPoolExecutor(min(len(others), MOST_ASKED)) as threads:
        return next(compress(others, threads.map(_leads, others)), first)


def _leads(job: RemoteJob) -> bool:
    with contextlib.suppress(ZmqTrainError):  # another worker's part of the parameters refuses
        job.status()
        return True
    return False


@contextlib.contextmanager
def reached(name: str, timeout_s: float = TIMEOUT_S) -> Iterator[RemoteJob]:
    """Yield the submitted job of this name, to be asked as long as the block runs.

    Raises:
        ConfigError: no job of this name was submitted.
    """
    submitted = submitted_job(name, or_logdir=True)
    lost = RemoteJob("", name, timeout_s, submitted=submitted)
    if submitted.stopped_at:
        yield replace(lost, ended=ended_job(submitted))
        return
    with contextlib.ExitStack() as stack:
        try:
            address = stack.enter_context(engine_of(submitted).located(submitted))
        except (PeerLostError, RefusedError) as error:
            ended = ended_job(submitted) if isinstance(error, NotRunningError) else None
            yield replace(lost, unreachable=error, ended=ended)
            return
        found = find_job({"ps": (address,), "keys": submitted.keys}, timeout_s)
        yield replace(found, name=name, submitted=submitted)


def of_logdir(logdir: str, flags: Mapping[str, Any], timeout_s: float = TIMEOUT_S) -> RemoteJob:
    """Return the job that runs with a logdir on this host, else the last one that ended there.

    Raises:
        ConfigError: no job ever ran there, or the one that does cannot be asked here.
    """
    for job in running_jobs():
        if job.logdir == os.path.abspath(logdir):
            return find_job({**flags, "ps": ",".join(job.ps)}, timeout_s)
    ended = ended_in(logdir)
    if is_claim_seen(str(checkpoints_directory(Path(logdir)) / "any")):
        raise ConfigError(
            f"a job runs with {logdir}, on another host or in a process alone; expected one with a "
            f"chief or ps 0 on this host; ask there, or give {names_of('ps')}"
        )
    return RemoteJob("", logdir, ended=ended)


def _leaders_of(config: TfConfig) -> tuple[str, ...]:
    """Return the address of ps 0; without ps those of the tasks that compute and can host it."""
    if config.is_dynamic or config.addresses_of(Role.PS):
        found = config.addresses_of(Role.PS)
        return (found[0],) if 0 in found else ()
    chief, workers = map(config.addresses_of, (Role.CHIEF, Role.WORKER))
    is_whole = chief or 0 in workers
    return (*chief.values(), *(workers[i] for i in sorted(workers))) if is_whole else ()


def _is_hosted(config: TaskConfig) -> bool:
    """Return whether worker 0 hosts ps 0: there are keys of workers, and none of a ps."""
    entries = () if config.keys is None else read_registry(Path(config.keys))
    roles = {entry.owner.role for entry in entries}
    return Role.WORKER in roles and Role.PS not in roles


def about_a_job(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the function of a command: it gets a :class:`RemoteJob` as its first argument."""

    @functools.wraps(command)
    def run(*, names: tuple[str, ...], timeout_s: float, logdir: str | None, **options: Any) -> Any:
        flags = {name: options.pop(name) for name in OPTIONS}
        ways = {"NAME": names, "--ps": flags["ps"], "--logdir": logdir}
        if len(given := [way for way, value in ways.items() if value]) > 1:
            raise ConfigError(f"the job is named by {' and '.join(given)}; expected one of them")
        if len(names) > 1:
            raise ConfigError(f"{' '.join(names)} is more than one name; expected that of one job")
        with contextlib.ExitStack() as stack:
            if names and options.get("force"):  # which asks nobody
                job = RemoteJob("", names[0], submitted=submitted_job(names[0], or_logdir=True))
            elif names:
                job = stack.enter_context(reached(names[0], timeout_s))
            elif logdir is not None:
                job = of_logdir(logdir, flags, timeout_s)
            else:
                job = find_job(flags, timeout_s)
            return command(job, **options)

    run = seconds_option("--timeout-s", TIMEOUT_S, "seconds to wait for an answer from ps 0")(run)
    for name, help in reversed(OPTIONS.items()):
        run = option_of(TaskConfig, name, help=help, optional=True)(run)
    which = "the job with this logdir, even if it has ended"
    run = click.option("--logdir", metavar="DIR", help=which)(run)
    return click.argument("names", metavar="[NAME]", nargs=-1)(run)


def _as_client(security: Security) -> Security:
    """Return the security for connections to ps 0, with the first client's key in the directory.

    If there is none, as on the host of a task, the key of a task can still ask for the status.
    """
    held = [] if security.directory is None else secrets_in(security.directory)
    clients = [owner for owner in held if owner.role == CLIENT.role]
    return replace(security, owner=min(clients or held, default=CLIENT), patience_s=0.0)


def _name_of(address: str) -> str:
    """Return the name of the job at this address, "" if it is not on this host."""
    with contextlib.suppress(ConfigError):  # only the name is missing then
        return next((job.job for job in running_jobs() if address in job.ps[:1]), "")
    return ""


def _since(began: float) -> str:
    """Return when a job began, today's date left out, "" if that is not known."""
    if not began:
        return ""
    at = datetime.fromtimestamp(began)
    is_today = at.date() == datetime.now().date()
    return f", since {at:%H:%M:%S}" if is_today else f", since {at:%Y-%m-%d %H:%M}"


def ways_to(jobs: Sequence[RunningJob]) -> list[str]:
    """Return the option by which commands find each of these jobs."""
    ways = [f"--logdir {job.logdir}" if job.logdir else f"--ps {job.ps[0]}" for job in jobs]
    return ways if len({*ways}) == len(jobs) else [f"--ps {job.ps[0]}" for job in jobs]


def _which(jobs: list[RunningJob]) -> str:
    if not jobs:
        return (
            "no job of this user has its chief or ps 0 on this host; if they run elsewhere, or "
            f"have not started, give the address of the job's ps 0 with {names_of('ps')}; if the "
            "job is over, give its --logdir"
        )
    ways = ways_to(jobs)
    width = max(map(len, ways))
    listing = "".join(
        f"\n  {way:<{width}}  {job.job} ({job.task}: process {job.pid}{_since(job.began)})"
        for way, job in zip(ways, jobs, strict=True)
    )
    return f"{len(jobs)} jobs run on this host; choose one:{listing}"
