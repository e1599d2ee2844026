"""A submission: the engine, the size of the job, and the resources of its tasks."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator

from zmqtrain.clusters.options import (
    OPTIONS,
    KubernetesOptions,
    RayOptions,
    SlurmOptions,
    SshOptions,
)
from zmqtrain.config.cluster import MAX_TASKS
from zmqtrain.config.options import Metavar, names_of
from zmqtrain.config.task import MAX_THREADS
from zmqtrain.errors import ConfigError

MAX_NAME = 40
"""With the role, two numbers and additions of engines it must fit into DNS's 63 letters."""

CHIEF_CPU = 0.1
"""CPUs of the chief, which mostly waits."""

LEAST_CPU = 0.001

_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_CPUS = re.compile(r"(\d+(?:\.\d+)?) *(m?)")
_SIZE = re.compile(r"(\d+(?:\.\d+)?) *([KMGT]?)(i?)B?", re.IGNORECASE)


def _valid_name(name: str) -> str:
    if len(name) > MAX_NAME or not _NAME.fullmatch(name):
        raise ValueError(
            f"expected at most {MAX_NAME} lower-case letters, digits and hyphens, a letter first"
        )
    return name


def nbytes_of(text: Any) -> Any:
    """Return the bytes that a text such as 8Gi, 512Mi or 2G means.

    Raises:
        ValueError: it is not a size.
    """
    if not isinstance(text, str):
        return text
    if not (found := _SIZE.fullmatch(text.strip())):
        raise ValueError("expected a size such as 8Gi or 512Mi")
    number, unit, binary = found.groups()
    power = " KMGT".index(unit.upper() or " ")
    return int(float(number) * (1024 if binary else 1000) ** power)


def cpus_of(text: Any) -> Any:
    """Return the CPUs that a text such as 2, 0.5 or 500m means.

    Raises:
        ValueError: it is not a number of CPUs.
    """
    if not isinstance(text, str):
        return text
    if not (found := _CPUS.fullmatch(text.strip())):
        raise ValueError("expected a number of CPUs such as 2, 0.5 or 500m")
    return float(found[1]) / (1000 if found[2] else 1)


Size = Annotated[int | None, BeforeValidator(nbytes_of), Metavar("SIZE")]
Cpus = Annotated[float, BeforeValidator(cpus_of), Metavar("CPUS")]


class Submission(RayOptions, SshOptions, SlurmOptions, KubernetesOptions):
    """The options of `zmqtrain submit`."""

    model_config = ConfigDict(populate_by_name=True)

    on: Literal["kubernetes", "slurm", "ssh", "ray"] = Field(
        description="the engine that starts the tasks"
    )
    name: Annotated[str, AfterValidator(_valid_name)] | None = Field(
        None, description="name of the job there (default: from the job's file, with a random end)"
    )
    ps: int = Field(
        1, ge=0, le=4096, description="number of parameter servers; 0: each worker hosts a part"
    )
    workers: int = Field(2, ge=1, le=MAX_TASKS, description="number of workers")
    max_workers: int | None = Field(
        None,
        ge=1,
        le=MAX_TASKS,
        description="largest number of workers for zmqtrain scale; keys and memory are for these "
        "(default: the same as --workers)",
    )
    cpu: Cpus = Field(
        1.0,
        ge=LEAST_CPU,
        le=MAX_THREADS,
        description=f"CPUs of each worker, such as 2, 0.5 or 500m; the chief asks for {CHIEF_CPU} "
        "(default: 1)",
    )
    ps_cpu: Cpus = Field(
        1.0, ge=LEAST_CPU, le=MAX_THREADS, description="CPUs of each ps (default: 1)"
    )
    memory: Size = Field(
        None, gt=0, description="memory of each worker and of the chief, such as 8Gi"
    )
    ps_memory: Size = Field(
        None,
        gt=0,
        description="memory for the parameters of each ps (default: by the job's placement, for "
        "which the job is loaded here)",
    )
    gpu: float = Field(
        0, ge=0, le=64, description="GPUs of each worker; on Ray also a part of one, such as 0.5"
    )

    @model_validator(mode="after")
    def _fill_hosts(self) -> Submission:
        if self.hosts and "workers" not in self.model_fields_set:
            self.workers = sum(host.slots for host in self.hosts)
        return self

    def refuse_options_of_other_engines(self) -> None:
        """Refuse options that would have no effect.

        Raises:
            ConfigError: an option was given that another engine has.
        """
        if self.gpu % 1 and self.on != "ray":
            raise ConfigError(
                f"{names_of('gpu')} is {self.gpu:g}, but only Ray gives parts of a GPU; expected a "
                "whole number; on Kubernetes a --template may ask for a share, such as one of MIG"
            )
        given, own = self.model_fields_set, OPTIONS[self.on].model_fields
        for engine, options in OPTIONS.items():
            if others := sorted(given & options.model_fields.keys() - own.keys()):
                name = options.model_fields[others[0]].title or others[0]
                raise ConfigError(
                    f"{names_of(name)} is an option of --on {engine}, but the job is submitted "
                    f"with --on {self.on}; leave it out, or change --on"
                )
