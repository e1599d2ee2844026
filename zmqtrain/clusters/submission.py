"""A submission: the engine and its options, the size of the job, the resources of its tasks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from zmqtrain.clusters.pod_options import PodOptions
from zmqtrain.config.cluster import MAX_TASKS
from zmqtrain.config.options import Metavar, names_of, parsed_by
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
_HOST = re.compile(r"((?:[\w.-]+@)?\w[\w.-]*)(?::([1-9]\d*))?")


class PsGpuOptions(BaseModel):
    ps_gpu: int = Field(0, ge=0, le=64, description="Kubernetes, Ray: GPUs of each ps")


class KubernetesOptions(PodOptions, PsGpuOptions):
    kind: Literal["jobset", "jobs", "tfjob", "trainjob"] = Field(
        "jobset",
        title="as",
        alias="as",
        description="Kubernetes: what the job becomes; jobset needs the JobSet controller, jobs "
        "none, tfjob the Training Operator, trainjob Kubeflow Trainer 2",
    )
    image: str | None = Field(
        None, min_length=1, description="Kubernetes: image with zmqtrain and the job"
    )
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = Field(
        None,
        description="Kubernetes: when nodes pull the image (default: if it is not there, for an "
        "image without a registry such as localhost/NAME; else as Kubernetes does)",
    )
    queue: str | None = Field(None, min_length=1, description="Kubernetes: local queue of Kueue")
    context: str | None = Field(None, min_length=1, description="Kubernetes: context of kubectl")
    namespace: str | None = Field(None, min_length=1, description="Kubernetes: namespace")
    in_place: bool = Field(
        False,
        description="Kubernetes 1.35 and later: the kubelet restarts a crashed task in its pod, "
        "also after it ran out of memory, instead of zmqtrain supervise",
    )


_OF_SCRIPTS = (
    *("job-name", "output", "error", "array", "nodes", "ntasks", "cpus-per-task", "mem-per-cpu"),
    *("gpus-per-task", "requeue", "no-requeue", "open-mode", "dependency", "chdir", "parsable"),
    *("wrap", "wait", "test-only", "export", "partition"),
)
"""Options of sbatch that the scripts set, or on which they depend."""


def _valid_word(text: str) -> str:
    if not re.fullmatch(r"[\w.,:@+=/%&|()\[\]*!-]+", text):  # it goes into a line of a script
        raise ValueError("expected a value that sbatch takes, such as sinfo shows, without spaces")
    return text


def _valid_options(text: str) -> str:
    for word in text.split():
        name = re.fullmatch(r"--([a-z][a-z-]*)(=.+)?", _valid_word(word))
        if name is None or any(own.startswith(name[1]) for own in _OF_SCRIPTS):
            raise ValueError(
                "expected long options of sbatch such as --reservation=lab --nice=10, which the "
                f"scripts do not set, unlike --{' --'.join(_OF_SCRIPTS)}"
            )
    return text


Word = Annotated[str, AfterValidator(_valid_word)] | None


class SlurmOptions(BaseModel):
    partition: Word = Field(
        None, description="Slurm: partition of ps and chief, best one without preemption"
    )
    worker_partition: Word = Field(
        None, description="Slurm: partition of the workers (default: the same)"
    )
    account: Word = Field(None, description="Slurm: account that is charged")
    qos: Word = Field(None, description="Slurm: quality of service")
    time: Word = Field(
        None,
        description="Slurm: time limit of the batch jobs, such as 2-12:00:00; at its end a job "
        "saves, and the next submission goes on",
    )
    constraint: Word = Field(None, description="Slurm: features that the nodes must have")
    exclude: Word = Field(None, description="Slurm: nodes that are not used")
    gres: Word = Field(None, description="Slurm: other resources on each node, such as lustre:1")
    sbatch: Annotated[str, AfterValidator(_valid_options)] | None = Field(
        None,
        min_length=1,
        description="Slurm: further options of sbatch, such as '--reservation=lab --nice=10'",
    )


@dataclass(frozen=True, slots=True)
class SshHost:
    """``login``: its name for ssh; ``slots``: most workers; ``address``: its name for peers."""

    login: str
    slots: int = 1
    address: str = ""

    def __str__(self) -> str:
        return f"{self.login}:{self.slots}"


def hosts_of(text: str) -> tuple[SshHost, ...]:
    """Return the hosts that a text such as ``a:2,me@b:4`` names.

    Raises:
        ValueError: it names none, or one twice.
    """
    found = [_HOST.fullmatch(part.strip()) for part in text.split(",")]
    hosts = tuple(SshHost(part[1], int(part[2] or 1)) for part in found if part)
    if len({host.login for host in hosts}) < len(found):
        raise ValueError(
            "expected different hosts, each with a number of workers, such as a:2,me@b:4; for "
            "another port or key of ssh, give the host a name in your ssh configuration"
        )
    return hosts


class SshOptions(BaseModel):
    hosts: Annotated[tuple[SshHost, ...], parsed_by(hosts_of)] = Field(
        (),
        description="ssh: the hosts, each with its largest number of workers, such as a:2,me@b:4; "
        "their sum is the default of --workers",
    )
    python: str | None = Field(
        None,
        min_length=1,
        description="ssh: Python with zmqtrain on the hosts (default: the path of this one)",
    )


class RayOptions(PsGpuOptions):
    address: str | None = Field(
        None,
        min_length=1,
        description="Ray: address of the cluster (default: RAY_ADDRESS, else the one of this host)",
    )


OPTIONS: dict[str, type[BaseModel]] = {
    "kubernetes": KubernetesOptions,
    "slurm": SlurmOptions,
    "ssh": SshOptions,
    "ray": RayOptions,
}


def _valid_name(name: str) -> str:
    if len(name) > MAX_NAME or not _NAME.fullmatch(name):
        raise ValueError(
            f"expected at most {MAX_NAME} lower-case letters, digits and hyphens, a letter first"
        )
    return name


def nbytes_of(text: str) -> int:
    """Return the bytes that a text such as 8Gi, 512Mi or 2G means.

    Raises:
        ValueError: it is not a size.
    """
    if not (found := _SIZE.fullmatch(text.strip())):
        raise ValueError("expected a size such as 8Gi or 512Mi")
    number, unit, binary = found.groups()
    power = " KMGT".index(unit.upper() or " ")
    return int(float(number) * (1024 if binary else 1000) ** power)


def cpus_of(text: str) -> float:
    """Return the CPUs that a text such as 2, 0.5 or 500m means.

    Raises:
        ValueError: it is not a number of CPUs.
    """
    if not (found := _CPUS.fullmatch(text.strip())):
        raise ValueError("expected a number of CPUs such as 2, 0.5 or 500m")
    return float(found[1]) / (1000 if found[2] else 1)


Size = Annotated[int | None, parsed_by(nbytes_of), Metavar("SIZE")]
Cpus = Annotated[float, parsed_by(cpus_of), Metavar("CPUS")]


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
