"""The options of a submission that only one engine has."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field

from zmqtrain.clusters.pod_options import PodOptions

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


def hosts_of(text: Any) -> Any:
    """Return the hosts that a text such as ``a:2,me@b:4`` names.

    Raises:
        ValueError: it names none, or one twice.
    """
    if not isinstance(text, str):
        return text
    found = [_HOST.fullmatch(part.strip()) for part in text.split(",")]
    hosts = tuple(SshHost(part[1], int(part[2] or 1)) for part in found if part)
    if len({host.login for host in hosts}) < len(found):
        raise ValueError(
            "expected different hosts, each with a number of workers, such as a:2,me@b:4; for "
            "another port or key of ssh, give the host a name in your ssh configuration"
        )
    return hosts


class SshOptions(BaseModel):
    hosts: Annotated[tuple[SshHost, ...], BeforeValidator(hosts_of)] = Field(
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
