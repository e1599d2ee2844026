"""What a task is told from outside; nothing else in zmqtrain reads options.

A value comes from the first of: its flag, its variable ``ZMQTRAIN_*``, TF_CONFIG (cluster and
index), honcho (cluster and index), its default. Each option is declared once, as a field below.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pydantic import Field, ValidationInfo, field_validator, model_validator

from zmqtrain.config.cluster import (
    MAX_PORT,
    MAX_TASKS,
    Cluster,
    Role,
    Task,
    bind_endpoint,
    canonical_address,
    connect_endpoint,
)
from zmqtrain.config.honcho import PROCESS_NAME, Process, process_of, running_counts
from zmqtrain.config.options import given, load, names_of
from zmqtrain.config.tf_config import parse_tf_config
from zmqtrain.config.timing import Timing
from zmqtrain.errors import ConfigError
from zmqtrain.job import JobOverrides
from zmqtrain.transport.keys import Owner
from zmqtrain.transport.security import Security

ENVIRON: Mapping[str, str] = os.environ
"""The variables of this process, as they are when they are looked up."""

TF_CONFIG = "TF_CONFIG"
MAX_THREADS = 1024
METRICS_PORTS = {Role.CHIEF: 9400, Role.PS: 9410, Role.WORKER: 9450}
"""First port of a role's metrics; task i of the role has the i-th after it."""

FindCounts: TypeAlias = Callable[[Mapping[str, str]], dict[str, int] | None]


class TaskConfig(Timing):
    """Everything a task needs that is not the job.

    Raises:
        pydantic.ValidationError: a value is out of range, an address is wrong or listed twice, or
            the index does not fit the cluster. :func:`load_task` turns it into a ConfigError.
    """

    role: Role
    job: str = Field(
        min_length=1, description="the job: file.py, file.py:name or package.module:name"
    )
    index: int = Field(
        0,
        ge=0,
        description="number of this task among those of its role, from 0 "
        "(TF_CONFIG and honcho give it too)",
    )
    base_port: int = Field(
        2222, ge=1, le=MAX_PORT, description="port of ps 0 in a local cluster; ps i has the i-th"
    )
    ps: tuple[str, ...] = Field(
        description="addresses of all ps, as host:port,host:port; a number N means N local ps from "
        "the base port on (TF_CONFIG and honcho give it too, else 1)"
    )
    workers: int = Field(
        1,
        ge=1,
        le=MAX_TASKS,
        description="how many workers the job expects (TF_CONFIG and honcho give it too)",
    )
    chief: bool = Field(
        True,
        description="whether the chief is a task of its own; if not, worker 0 hosts it "
        "(TF_CONFIG and honcho give it too)",
    )
    bind: str | None = Field(
        None,
        min_length=1,
        description="IP address or interface on which a ps listens (loopback if its own address "
        "is a loopback one, else all)",
    )
    keys: str | None = Field(
        None,
        min_length=1,
        description="directory of keys (zmqtrain keys new makes one); with it every tcp connection "
        "is encrypted and both ends prove who they are",
    )
    insecure: bool = Field(
        False,
        description="whether to listen and connect beyond this host without keys",
    )
    lane: Literal["auto", "memory", "shm", "tcp"] = Field(
        "auto",
        description="how tensors travel: memory (one process), shm (one host), tcp; auto takes the "
        "best that both ends share",
    )
    segment_dir: str | None = Field(
        None,
        min_length=1,
        description="directory in which a ps keeps its memory as a file that others may map "
        "(a directory of the user's own in /dev/shm)",
    )
    crash_safe: bool = Field(
        True,
        description="whether a killed ps, when it is started again, goes on exactly where it was; "
        "costs a copy of what an update rewrites",
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
        description="file with the TLS certificate (PEM, with its chain) with which metrics and "
        "health are served over https",
    )
    metrics_key: str | None = Field(
        None, min_length=1, description="file with the private key of that certificate (PEM)"
    )
    threads: int | None = Field(
        None,
        ge=1,
        le=MAX_THREADS,
        description="threads that linear algebra, and on a ps a large update, may use in this task "
        "(one for each core)",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="the least severe messages that are logged"
    )

    @field_validator("ps", mode="before")
    @classmethod
    def _parse_ps(cls, value: Any, info: ValidationInfo) -> tuple[str, ...]:
        if isinstance(value, int | str):
            text = str(value).strip()
            if text.isascii() and text.isdigit() and len(text) <= 5:
                first = info.data.get("base_port", 1)
                value = [f"127.0.0.1:{first + index}" for index in range(int(text))]
            else:
                value = text.split(",")
        try:
            addresses = tuple(canonical_address(address) for address in value)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        if not addresses:
            raise ValueError("expected at least one ps, which keeps the parameters")
        if len(set(addresses)) < len(addresses):
            twice = next(a for a in addresses if addresses.count(a) > 1)
            raise ValueError(f"{twice} is listed twice; expected an address of its own for each ps")
        return addresses

    @model_validator(mode="after")
    def _index_fits_cluster(self) -> TaskConfig:
        if self.role is Role.CHIEF and not self.chief:
            raise ValueError(
                f"this task was started as a chief, but by {names_of('chief')}, TF_CONFIG or "
                "honcho the cluster has none and worker 0 hosts it; leave this task out, or say "
                "to every task that there is a chief"
            )
        count = {Role.PS: len(self.ps), Role.WORKER: self.workers, Role.CHIEF: 1}[self.role]
        if self.index >= count:
            more = {Role.PS: "ps", Role.WORKER: "workers"}.get(self.role)
            remedy = f", or have more by {names_of(more)}" if more else ""
            raise ValueError(
                f"{names_of('index')} is {self.index}; expected {_range(count)} for a "
                f"{self.role}; correct it{remedy}"
            )
        return self

    @model_validator(mode="after")
    def _certificate_has_its_key(self) -> TaskConfig:
        if (self.metrics_cert is None) != (self.metrics_key is None):
            given, missing = ("metrics_cert", "metrics_key")[:: 1 if self.metrics_cert else -1]
            raise ValueError(
                f"{names_of(given)} is given, but not {names_of(missing)}; expected both or none; "
                "give the other one, too"
            )
        return self

    @property
    def task(self) -> Task:
        return Task(self.role, self.index)

    @property
    def cluster(self) -> Cluster:
        return Cluster(self.ps, self.workers, self.chief)

    @property
    def hosts_chief(self) -> bool:
        """Whether the chief runs in this task."""
        return self.task == self.cluster.chief_host

    @property
    def bind_endpoint(self) -> str:
        """The ZeroMQ endpoint that this task binds; only a ps has one."""
        if self.role is not Role.PS:
            raise ConfigError(f"{self.task} binds no socket; only ps tasks do")
        return bind_endpoint(self.ps[self.index], self.bind)

    @property
    def security(self) -> Security:
        """What this task trusts, and whose keys it expects where."""
        return Security(
            Owner(self.role.value, self.index),
            None if self.keys is None else Path(self.keys),
            self.insecure,
            {connect_endpoint(address): Owner("ps", i) for i, address in enumerate(self.ps)},
        )

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


def load_task(
    role: Role,
    flags: Mapping[str, Any],
    environ: Mapping[str, str] = ENVIRON,
    find_counts: FindCounts = running_counts,
) -> TaskConfig:
    """Return the configuration of the task that this process is.

    ``flags`` holds what :func:`zmqtrain.options.options_of` gave the command. ``find_counts`` is
    asked how many tasks honcho runs, if honcho started this process and nothing else tells.

    Raises:
        ConfigError: a value is wrong or missing, TF_CONFIG has mistakes, or TF_CONFIG or honcho
            started this process as a task of another role.
    """
    said = given(TaskConfig, flags, environ)
    cluster, task = parse_tf_config(environ.get(TF_CONFIG, ""))
    process = process_of(environ)
    _check_role(role, task, process)
    known: dict[str, Any] = {"role": role, "ps": "1"}
    if cluster is not None:
        known |= _of_tf_config(cluster, role, said)
    elif process is not None and not {"ps", "workers"} <= said.keys():
        known |= _of_honcho(find_counts(environ), said)
    if task is not None:
        known["index"] = task.index
    elif process is not None and process.type == role:
        known["index"] = process.index
    elif "index" not in said and role is not Role.CHIEF:
        _check_index_needed(cluster, process)
    return load(TaskConfig, known | said)


def load_overrides(
    flags: Mapping[str, Any], environ: Mapping[str, str] = ENVIRON
) -> dict[str, Any]:
    """Return what flags and variables say about the job, for ``Job.with_overrides``.

    Raises:
        ConfigError: a value is wrong.
    """
    return load(JobOverrides, given(JobOverrides, flags, environ)).model_dump(exclude_none=True)


def _check_role(role: Role, task: Task | None, process: Process | None) -> None:
    if task is not None and task.role is not role:
        raise ConfigError(
            f"TF_CONFIG says that this task is {task}, but it was started as a {role}; "
            f"start it with python -m zmqtrain.roles.{task.role}, or correct TF_CONFIG's task"
        )
    if task is None and process is not None and process.type in set(Role) - {role}:
        raise ConfigError(
            f"honcho calls this process {process}, but it was started as a {role}; "
            f"expected the Procfile's line {process.type} to start python -m "
            f"zmqtrain.roles.{process.type}; correct the line or its name"
        )


def _check_index_needed(cluster: Cluster | None, process: Process | None) -> None:
    """Refuse to take index 0 for granted where several tasks would."""
    if cluster is not None:
        raise ConfigError(
            "TF_CONFIG has a cluster but no task section, so every task would have index 0; "
            'expected one such as "task": {"type": "worker", "index": 0}; add it, or give '
            f"{names_of('index')}"
        )
    if process is not None:
        raise ConfigError(
            f"honcho calls this process {process}, and {process.type!r} is no role, so its index "
            "is not known; expected ps, worker or chief; rename the Procfile's line, or give "
            f"{names_of('index')}"
        )


def _of_tf_config(cluster: Cluster, role: Role, said: Mapping[str, Any]) -> dict[str, Any]:
    if cluster.partial:
        hidden = ["workers", "chief"] if role is Role.WORKER else ["ps", "workers", "chief"]
        if missing := [name for name in hidden if name not in said]:
            raise ConfigError(
                "TF_CONFIG is that of a TFJob with dynamic workers, which shows a task only a part "
                f"of the cluster; give {_and([names_of(name) for name in missing])} to every task"
            )
    holes = [f"ps {index}" for index, address in enumerate(cluster.ps) if not address]
    if "ps" not in said:
        if holes:
            raise ConfigError(
                f"TF_CONFIG leaves out {_and(holes)}; expected all ps from 0 on, since each holds "
                f"a part of the parameters; add what is missing, or give {names_of('ps')}"
            )
        _check_some("ps", len(cluster.ps), "TF_CONFIG lists")
    if "workers" not in said:
        _check_some("workers", cluster.workers, "TF_CONFIG lists")
    return {"ps": cluster.ps, "workers": cluster.workers, "chief": cluster.chief}


def _of_honcho(counts: Mapping[str, int] | None, said: Mapping[str, Any]) -> dict[str, Any]:
    missing = [name for name in ("ps", "workers") if name not in said]
    if counts is None:
        raise ConfigError(
            f"{PROCESS_NAME} is set, but there is no honcho above this process to tell how "
            f"many tasks there are; give {_and([names_of(name) for name in missing])}"
        )
    ps, workers = counts.get(Role.PS, 0), counts.get(Role.WORKER, 0)
    known: dict[str, Any] = {"workers": workers}
    if "workers" in missing:
        _check_some("workers", workers, "honcho starts")
    if "ps" in missing:
        # Only then does honcho run the whole cluster; otherwise the chief may be elsewhere too.
        _check_some("ps", ps, "honcho starts")
        known |= {"ps": str(ps), "chief": counts.get(Role.CHIEF, 0) > 0}
    return known


def _check_some(field: str, count: int, source: str) -> None:
    if count == 0:
        raise ConfigError(
            f"{source} no {field.removesuffix('s') if field == 'workers' else field}; expected at "
            f"least one; add it there, or give {names_of(field)}"
        )


def _range(count: int) -> str:
    return "0" if count == 1 else f"0 to {count - 1}"


def _and(names: Sequence[str]) -> str:
    *head, last = names
    return f"{', '.join(head)} and {last}" if head else last
