"""The configuration of a task, from its flags and its environment.

A value comes from the first of: its flag, its variable ``ZMQTRAIN_*``, TF_CONFIG (cluster and
index), honcho (cluster and index), the engine (index), its default. Each option is a field below.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from zmqtrain.config.cluster import (
    MAX_PORT,
    MAX_TASKS,
    Cluster,
    Role,
    Task,
    canonical_address,
    parse_addresses,
    parse_workers,
)
from zmqtrain.config.options import names_of, parsed_by, values_of, variable_of
from zmqtrain.config.resolvers import engine, honcho, tf_config
from zmqtrain.config.resolvers.honcho import PROCESS_NAME
from zmqtrain.config.resolvers.tf_config import TF_CONFIG
from zmqtrain.config.timing import Timing
from zmqtrain.errors import ConfigError
from zmqtrain.hints import expectation
from zmqtrain.store.segment_files import can_be_shared, default_directory
from zmqtrain.transport.keys import Owner
from zmqtrain.transport.security import PATIENCE_S, Security

ENVIRON: Mapping[str, str] = os.environ
"""The variables of this process."""

RESOLVERS = (tf_config.resolve, honcho.resolve, engine.resolve)
"""Sources of the cluster around this process; each adds options that earlier ones lack.

A resolver gets the role, the options known so far and the variables. It returns what it finds of
index, ps, workers, worker_addresses, chief and its address.
"""

LEAVING_S = 25.0
"""The default of grace_s with --on-term leave: the time that most engines give, less some."""

MAX_THREADS = 1024
METRICS_PORTS = {Role.CHIEF: 9400, Role.PS: 9410, Role.WORKER: 9450}
"""Port of the metrics of a role's task 0; task i has this port + i."""


class SharedConfig(Timing):
    """Options that are the same for all tasks of a cluster, except for its addresses."""

    lane: Literal["auto", "memory", "shm", "tcp"] = Field(
        "auto",
        description="how tensors are sent: memory (one process), shm (one host), tcp; auto takes "
        "the fastest that both ends support",
    )
    segment_dir: str | None = Field(
        None,
        min_length=1,
        description="directory for the memory of a ps, a file that other tasks map "
        "(default: the user's directory in /dev/shm)",
    )
    crash_safe: bool = Field(
        True,
        description="whether a restarted ps continues exactly where it was killed; makes an update "
        "about 30 % slower",
    )

    profile: str | None = Field(
        None,
        min_length=1,
        description="directory into which each worker writes a profile of some steps: a trace of "
        "PyTorch's operations, else the statistics of calls by Python's cProfile",
    )

    trace: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of the pushes, such as 0.01, of which workers and ps send traces to the "
        "collector of OTEL_EXPORTER_OTLP_ENDPOINT (needs the extra otel)",
    )

    @property
    def segment_directory(self) -> Path | None:
        """The directory for the memory of a ps; None if this host has none.

        Raises:
            ConfigError: one is given, but this system cannot share memory in files.
        """
        if self.segment_dir is None:
            return default_directory()
        if not can_be_shared():
            raise ConfigError(
                f"{names_of('segment_dir')} is {self.segment_dir!r}, but {sys.platform} cannot "
                "share a ps's memory in files; expected Linux; omit it"
            )
        return Path(self.segment_dir)


class TaskConfig(SharedConfig):
    """Everything a task needs that is not the job.

    Raises:
        pydantic.ValidationError: a value is out of range, or an address is wrong.
        ConfigError: values do not fit together.
    """

    role: Role
    job: str = Field(
        min_length=1, description="the job: file.py, file.py:name or package.module:name"
    )
    index: int = Field(
        0,
        ge=0,
        description="number of this task within its role, from 0 (default: from TF_CONFIG, honcho, "
        "JOB_COMPLETION_INDEX, SLURM_ARRAY_TASK_ID or SLURM_PROCID)",
    )
    base_port: int = Field(
        2222,
        ge=1,
        le=MAX_PORT,
        description="port of ps 0 in a local cluster, or, without ps, of worker 0; the others have "
        "the ports after it",
    )
    ps: Annotated[tuple[str, ...], parsed_by(parse_addresses)] = Field(
        (),
        description="addresses of all ps, as host:port,host:port; a number N means N local ps from "
        "the base port on; 0: each worker hosts one (default: from TF_CONFIG or honcho, else 1)",
    )
    workers: int = Field(1, ge=1, le=MAX_TASKS)
    worker_addresses: Annotated[tuple[str, ...], parsed_by(parse_workers)] = Field(
        (),
        title="workers",
        description="number of workers that the job expects, or, without ps, the addresses where "
        "they listen, as host:port,host:port (default: from TF_CONFIG or honcho)",
    )
    max_workers: int = Field(
        0,
        ge=0,
        le=MAX_TASKS,
        description="largest number of workers while the job runs, which limits their indices "
        "(default: the same as --workers)",
    )
    chief: bool = Field(
        True,
        description="whether the chief is a separate task; if not, worker 0 hosts it "
        "(default: from TF_CONFIG or honcho; without ps it is not)",
    )
    chief_address: str = ""  # where TF_CONFIG has the chief listen
    on_term: Literal["end", "leave"] = Field(
        "end",
        description="what SIGTERM does to a chief or a ps; end: it ends the job; leave, for "
        "engines that take machines away: the task exits, a ps after a checkpoint, and the job "
        "goes on with the next chief or ps",
    )
    bind: str | None = Field(
        None,
        min_length=1,
        description="IP address or interface on which a ps listens (default: loopback if its "
        "address is a loopback address, else all)",
    )
    keys: str | None = Field(
        None,
        min_length=1,
        description="directory of keys (made by zmqtrain keys new); with keys every tcp connection "
        "is encrypted and authenticated",
    )
    insecure: bool = Field(
        False,
        description="whether to connect without keys: every host and every local user that can "
        "reach a ps may then read, change and stop the job",
    )
    metrics_host: str = Field(
        "127.0.0.1", min_length=1, description="IP address on which metrics and health are served"
    )
    metrics_port: int | None = Field(
        None,
        ge=0,
        le=MAX_PORT,
        description="port of metrics and health, 0 for any free one (chief 9400, ps i 9410+i, "
        "worker i 9450+i)",
    )
    metrics_cert: str | None = Field(
        None,
        min_length=1,
        description="file with a TLS certificate (PEM, with its chain), to serve metrics and "
        "health over https",
    )
    metrics_key: str | None = Field(
        None, min_length=1, description="file with the private key of that certificate (PEM)"
    )
    ended_file: str | None = Field(
        None,
        min_length=1,
        description="file into which the chief writes how the job ended, as JSON, in addition to "
        "ended.json in the logdir",
    )
    threads: int | None = Field(
        None,
        ge=1,
        le=MAX_THREADS,
        description="threads of this task for linear algebra and, on a ps, for large updates "
        "(default: one for each core)",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="the lowest level of messages that are logged"
    )
    log_format: Literal["text", "json"] = Field(
        "text", description="lines of text, or one JSON object per line"
    )

    @field_validator("ps")
    @classmethod
    def _placed_on_this_host(
        cls, addresses: tuple[str, ...], info: ValidationInfo
    ) -> tuple[str, ...]:
        first = info.data.get("base_port", 1)
        placed = tuple(
            canonical_address(address or f"127.0.0.1:{first + index}")
            for index, address in enumerate(addresses)
        )
        if twice := [address for address in placed if placed.count(address) > 1]:
            raise ConfigError(
                f"{names_of('ps')} lists {twice[0]} twice; expected a different address for each ps"
            )
        return placed

    @model_validator(mode="after")
    def _check_index(self) -> TaskConfig:
        if self.role is Role.CHIEF and not self.chief:
            raise ConfigError(
                f"this task was started as a chief, but by {names_of('chief')}, TF_CONFIG or "
                "honcho the cluster has none and worker 0 hosts it; do not start this task, or "
                "give every task --chief"
            )
        if self.role is Role.PS and not self.ps:
            raise ConfigError(
                f"this task was started as a ps, but {names_of('ps')} or TF_CONFIG gives none, so "
                f"each worker hosts one; do not start this task, or give {names_of('ps')}"
            )
        if 0 < self.max_workers < self.workers:
            raise ConfigError(
                f"{names_of('max_workers')} is {self.max_workers}, but {names_of('workers')} is "
                f"{self.workers}; expected at least as many; correct one of them"
            )
        workers = max(self.workers, self.max_workers)
        count = {Role.PS: len(self.ps), Role.WORKER: workers, Role.CHIEF: 1}[self.role]
        if self.index >= count:
            more = {Role.PS: "ps", Role.WORKER: "max_workers"}.get(self.role)
            remedy = f", or give more with {names_of(more)}" if more else ""
            raise ConfigError(
                f"{names_of('index')} is {self.index}; expected at most {count - 1}, "
                f"for the first {self.role} is 0; correct it{remedy}"
            )
        return self

    @model_validator(mode="after")
    def _check_certificate(self) -> TaskConfig:
        if (self.metrics_cert is None) != (self.metrics_key is None):
            given, missing = ("metrics_cert", "metrics_key")[:: 1 if self.metrics_cert else -1]
            raise ConfigError(
                f"{names_of(given)} is given, but not {names_of(missing)}; expected both or none"
            )
        return self

    @property
    def task(self) -> Task:
        return Task(self.role, self.index)

    def of(self, task: Task) -> TaskConfig:
        """Return the configuration of another task in this process."""
        return self.model_copy(update={"role": task.role, "index": task.index})

    @property
    def cluster(self) -> Cluster:
        given = {field.name: getattr(self, field.name) for field in fields(Cluster)}
        return Cluster(
            **given | {"chief": self.chief if "chief" in self.model_fields_set else None}
        )

    def security(self, owner: Owner, servers: Mapping[str, Owner]) -> Security:
        """Return the key of this task, and those that it expects at the endpoints of others."""
        directory = None if self.keys is None else Path(self.keys)
        return Security(owner, directory, self.insecure, servers, PATIENCE_S)

    @property
    def metrics_tls(self) -> tuple[str, str] | None:
        """Files of the certificate and the key with which metrics are served; None without TLS."""
        if self.metrics_cert is None or self.metrics_key is None:
            return None
        return self.metrics_cert, self.metrics_key

    @property
    def metrics_address(self) -> tuple[str, int]:
        """Host and port of metrics and health; port 0 means any free one."""
        if self.metrics_port is not None:
            return self.metrics_host, self.metrics_port
        return self.metrics_host, METRICS_PORTS[self.role] + self.index


ROLE = "ZMQTRAIN_ROLE"
"""Variable with the role of a process, for roles.task and scripts."""

OF_A_CLUSTER = tuple(map(variable_of, ("ps", "workers", "max_workers")))
"""Variables that describe a cluster, but not the task of this process."""


def role_of_process(environ: Mapping[str, str] = ENVIRON) -> tuple[Role | None, str]:
    """Return the role that the variables give to this process, and which variable does.

    It is the first of ``ZMQTRAIN_ROLE``, TF_CONFIG and the name of the Procfile's line.

    Raises:
        ConfigError: TF_CONFIG has a mistake, or there is no such role.
    """
    if text := environ.get(ROLE, "").strip():
        return tf_config.role_called(text.lower(), f"{ROLE} is {text!r}"), ROLE
    task = tf_config.read_tf_config(environ.get(TF_CONFIG, "")).task
    if task is not None:
        return task.role, TF_CONFIG
    line, _ = honcho.process_of(environ) or ("", 0)
    return (Role(line), PROCESS_NAME) if line in set(Role) else (None, "")


def role_of_script(environ: Mapping[str, str] = ENVIRON) -> tuple[Role | None, str]:
    """Return the role of a process that runs a script, and which variable gives it.

    Without a role the script trains in this process alone. As in TensorFlow, a TF_CONFIG with at
    most one task describes no cluster.

    Raises:
        ConfigError: see :func:`role_of_process`, or variables describe a cluster or give an index,
            but do not give this process a role.
    """
    role, source = role_of_process(environ)
    config = tf_config.read_tf_config(environ.get(TF_CONFIG, ""))
    given = [name for name in OF_A_CLUSTER if environ.get(name, "").strip()]
    if source == TF_CONFIG and config.is_single and not given:
        return None, ""
    index = variable_of("index")
    is_cluster = len(config.addresses or ()) > 1
    if role is None and (is_cluster or environ.get(index, "").strip()):
        what = f"{TF_CONFIG} lists a cluster" if is_cluster else f"{index} is {environ[index]!r}"
        raise ConfigError(
            f"{what}, but this process has no role; give {TF_CONFIG} a task "
            f'such as {{"type": "worker", "index": 0}}, or set {ROLE}; or unset it, to train in '
            "this process alone"
        )
    return role, source


def forget_tf_config() -> None:
    """Hide TF_CONFIG from this process and those that it starts."""
    os.environ.pop(TF_CONFIG, None)


def load_task(
    role: Role, flags: Mapping[str, Any], environ: Mapping[str, str] = ENVIRON
) -> TaskConfig:
    """Return the configuration of the task that this process is.

    ``flags``: values of a command with the options of TaskConfig, see
    :func:`zmqtrain.config.options.options_of`.

    Raises:
        ConfigError: values do not fit together, TF_CONFIG has mistakes, or TF_CONFIG or honcho
            started this process as a task of another role.
    """
    values = values_of(TaskConfig, flags)
    for resolve in RESOLVERS:
        values = resolve(role, values, environ) | values
    sources = [name for name in (TF_CONFIG, PROCESS_NAME) if environ.get(name, "").strip()]
    if sources and "index" not in values and role is not Role.CHIEF:
        raise ConfigError(
            f"{' and '.join(sources)} describe a cluster, but not the index of this task; add to "
            f'TF_CONFIG such as "task": {{"type": "{role}", "index": 0}}, name the '
            f"Procfile's line {role}, or give {names_of('index')}"
        )
    if values.get("on_term") == "leave":
        values = {"grace_s": LEAVING_S} | values
    values = {"role": role, "ps": "1"} | values
    if isinstance(addresses := values.get("workers"), tuple):
        values |= {"workers": len(addresses)}
        values |= {"worker_addresses": addresses} if any(addresses) else {}
    try:
        return TaskConfig(**values)
    except ValidationError as error:
        raise ConfigError(
            "; ".join(
                f"{names_of(str(mistake['loc'][0]))} is {mistake['input']!r}; "
                f"{expectation(mistake)}"
                for mistake in error.errors()
            )
        ) from None
