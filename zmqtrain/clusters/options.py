"""The options of a submission that only one engine has."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field

_HOST = re.compile(r"((?:[\w.-]+@)?\w[\w.-]*)(?::([1-9]\d*))?")


class KubernetesOptions(BaseModel):
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


def _valid_word(text: str) -> str:
    if not re.fullmatch(r"[\w.,:@+-]+", text):  # it goes into a line of a script
        raise ValueError("expected a value that sbatch takes, such as sinfo shows, without spaces")
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


class RayOptions(BaseModel):
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
