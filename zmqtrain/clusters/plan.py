"""What a job needs of an engine that starts its tasks, whichever engine that is. Pure.

A :class:`Submission` is what the user asks for; a :class:`Plan` adds what follows from the job.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from zmqtrain.config.cluster import MAX_TASKS, Cluster, Role, Task
from zmqtrain.config.options import Metavar, names_of, text_of, variable_of
from zmqtrain.config.restarts import Advice, advice
from zmqtrain.config.task import MAX_THREADS
from zmqtrain.errors import ConfigError, ExitCode
from zmqtrain.job import Job
from zmqtrain.planning import plan as planning
from zmqtrain.planning.plan import plan_for
from zmqtrain.planning.strategy import check, is_on_workers, spread_cluster
from zmqtrain.server.receiver import MESSAGES_NBYTES
from zmqtrain.server.shard_memory import copies_nbytes
from zmqtrain.store.shard import segment_layout
from zmqtrain.transport.keys import REGISTRY, Owner, secret_name

MAX_NAME = 40
"""With the role, two numbers and what engines add, it has to fit into the 63 letters of DNS."""

SUFFIX_LENGTH = 4
LETTERS = "bcdfghjkmnpqrstvwxz23456789"
"""Of a name's random part: it spells no word, and nothing in it looks like something else."""

MIB = 1 << 20
PROCESS_NBYTES = 1 << 30
"""Memory of a ps beside its parameters, copies and messages: Python, the job's framework."""

SPARE_NBYTES = 16 * MIB
"""Room in /dev/shm beside the segment: a pod that needs a byte more is evicted."""

CHIEF_CPU, LEAST_CPU = 0.1, 0.001
"""CPUs of the chief, which mostly waits, and the fewest that a task may ask for."""

GRACE_S = 60
"""From SIGTERM to SIGKILL; a ps has a snapshot taken meanwhile."""

JOIN_TIMEOUT_S = 3600
"""How long a task waits for one that has not been started: it may be pending, or its image on its
way. Giving up is permanent, and `why` says meanwhile what the engine waits for."""

PERMANENT = tuple(int(code) for code in ExitCode if advice(code) is Advice.NO)
"""Exit codes after which an engine does not start a task again."""

ENDED = tuple(int(code) for code in ExitCode if advice(code) is not Advice.YES)
"""The same, and those of a task that is done or was told to leave; after others it is restarted
where it was."""

FIRST_PORT, PORTS, JOBS = 20000, 32, 375
"""Two jobs on a host do not meet: each has so many ports, below those that Linux gives out."""

_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_HOST = re.compile(r"((?:[\w.-]+@)?\w[\w.-]*)(?::([1-9]\d*))?")
_CPUS = re.compile(r"(\d+(?:\.\d+)?) *(m?)")
_SIZE = re.compile(r"(\d+(?:\.\d+)?) *([KMGT]?)(i?)B?", re.IGNORECASE)


def _valid_name(name: str) -> str:
    if len(name) > MAX_NAME or not _NAME.fullmatch(name):
        raise ValueError(
            f"expected at most {MAX_NAME} lower-case letters, digits and hyphens, a letter first"
        )
    return name


def _valid_partition(name: str) -> str:
    if not re.fullmatch(r"[\w.,@+-]+", name):  # it goes into a line of a script
        raise ValueError("expected names of partitions as sinfo shows them, separated by commas")
    return name


def _valid_word(text: str) -> str:
    if not re.fullmatch(r"[\w.,:@+-]+", text):
        raise ValueError("expected a value that sbatch takes, without spaces")
    return text


SlurmName = Annotated[str, AfterValidator(_valid_word)] | None


def nbytes_of(text: Any) -> Any:
    """Return the bytes that a text such as 8Gi, 512Mi or 2G means.

    Raises:
        ValueError: it is no size.
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
        ValueError: it is no number of CPUs.
    """
    if not isinstance(text, str):
        return text
    if not (found := _CPUS.fullmatch(text.strip())):
        raise ValueError("expected a number of CPUs such as 2, 0.5 or 500m")
    return float(found[1]) / (1000 if found[2] else 1)


Size = Annotated[int | None, BeforeValidator(nbytes_of), Metavar("SIZE")]
Cpus = Annotated[float, BeforeValidator(cpus_of), Metavar("CPUS")]


@dataclass(frozen=True, slots=True)
class Host:
    """``login``: how ssh calls it; ``slots``: its most workers; ``address``: what peers call it."""

    login: str
    slots: int = 1
    address: str = ""


def hosts_of(text: Any) -> Any:
    """Return the hosts that a text such as ``a:2,me@b:4`` names.

    Raises:
        ValueError: it names none, or one twice.
    """
    if not isinstance(text, str):
        return text
    found = [_HOST.fullmatch(part.strip()) for part in text.split(",")]
    hosts = tuple(Host(part[1], int(part[2] or 1)) for part in found if part)
    if len({host.login for host in hosts}) < len(found):
        raise ValueError(
            "expected different hosts, each with its most workers, such as a:2,me@b:4; for another "
            "port or key of ssh, give the host a name in your ssh configuration"
        )
    return hosts


class Submission(BaseModel):
    """How a job is submitted: where to, its size, and what its tasks get."""

    model_config = ConfigDict(populate_by_name=True)

    on: Literal["kubernetes", "slurm", "ssh", "ray"] = Field(
        description="the engine that starts the tasks"
    )
    kind: Literal["jobset", "jobs", "tfjob", "trainjob"] = Field(
        "jobset",
        title="as",
        alias="as",
        description="Kubernetes: what the job becomes; jobset needs the JobSet controller, jobs "
        "none, tfjob the Training Operator, trainjob Kubeflow Trainer 2",
    )
    name: Annotated[str, AfterValidator(_valid_name)] | None = Field(
        None, description="name of the job there (default: from the job's file, with a random end)"
    )
    ps: int = Field(
        1, ge=0, le=4096, description="how many parameter servers; 0: each worker hosts a part"
    )
    workers: int = Field(2, ge=1, le=MAX_TASKS, description="how many workers")
    max_workers: int | None = Field(
        None,
        ge=1,
        le=MAX_TASKS,
        description="how many workers zmqtrain scale may start; keys and memory are made for these "
        "(default: as many as workers)",
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
    gpu: int = Field(0, ge=0, le=64, description="GPUs of each worker")
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
    partition: Annotated[str, AfterValidator(_valid_partition)] | None = Field(
        None,
        description="Slurm: partition of ps and chief, best one without preemption",
    )
    worker_partition: Annotated[str, AfterValidator(_valid_partition)] | None = Field(
        None, description="Slurm: partition of the workers (default: the same)"
    )
    account: SlurmName = Field(None, description="Slurm: account that is charged")
    qos: SlurmName = Field(None, description="Slurm: quality of service")
    time: SlurmName = Field(
        None,
        description="Slurm: time limit of the batch jobs, such as 2-12:00:00; at its end a job "
        "saves, and the next submission goes on",
    )
    hosts: Annotated[tuple[Host, ...], BeforeValidator(hosts_of)] = Field(
        (),
        description="ssh: the hosts, each with its most workers, such as a:2,me@b:4; there are as "
        "many workers, unless --workers says otherwise",
    )
    address: str | None = Field(
        None,
        min_length=1,
        description="Ray: address of the cluster (default: RAY_ADDRESS, else the one of this host)",
    )
    python: str | None = Field(
        None,
        min_length=1,
        description="ssh: Python with zmqtrain on the hosts (default: the path of this one)",
    )

    @model_validator(mode="after")
    def _workers_fill_the_hosts(self) -> Submission:
        if self.hosts and "workers" not in self.model_fields_set:
            self.workers = sum(host.slots for host in self.hosts)
        return self


@dataclass(frozen=True, slots=True)
class Resources:
    """What one task gets; ``memory_nbytes`` 0: no limit; ``shared_nbytes``: of it in /dev/shm."""

    cpu: float = 1.0
    memory_nbytes: int = 0
    gpu: int = 0
    shared_nbytes: int = 0

    @property
    def threads(self) -> int:
        """The CPUs as a whole number, for threads, and for engines that give no fractions."""
        return math.ceil(self.cpu)


@dataclass(frozen=True, slots=True)
class Plan:
    """The tasks of a job and what they need.

    ``asked``: of it, what concerns one engine only. ``job``: as the tasks are told it.
    ``overrides``: fields of the job, by name. ``logdir``: as the user gave it, which each engine
    reads in its own way. ``keys``: text of each file of the directory of keys, by name;
    ``keys_directory``: that directory on this host. ``variables``: further variables of every task.
    ``python``: the tasks' interpreter. ``working``: where they start, if they have our paths.
    """

    name: str
    asked: Submission
    job: str
    ps: int
    workers: int
    max_workers: int
    resources: Mapping[Role, Resources]
    overrides: Mapping[str, object] = field(default_factory=dict)
    logdir: str | None = None
    keys: Mapping[str, str] = field(default_factory=dict)
    keys_directory: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    python: str = "python3"
    working: str = ""

    @property
    def counts(self) -> dict[Role, int]:
        """How many tasks of each role are started; without ps worker 0 hosts the chief."""
        if not self.ps:
            return {Role.WORKER: self.workers}
        return {Role.PS: self.ps, Role.CHIEF: 1, Role.WORKER: self.workers}

    @property
    def leader(self) -> Role:
        """The role whose task 0 is, or hosts, ps 0."""
        return Role.PS if self.ps else Role.WORKER

    @property
    def concluding(self) -> Role:
        """The role whose success is that of the job."""
        return Role.CHIEF if self.ps else Role.WORKER

    def environment(
        self, role: Role, listening: Sequence[str], keys: str, logdir: str | None
    ) -> dict[str, str]:
        """Return the variables of the tasks of a role.

        ``listening``: addresses of all ps, or, without ps, of all workers; empty if the engine's
        own variables or scripts say them. ``keys``, ``logdir``: where a task finds them.
        """
        addresses = {"ps" if self.ps else "workers": ",".join(listening)} if listening else {}
        values: dict[str, object] = {
            "job": self.job,
            "ps": self.ps,
            "workers": self.workers,
            "max_workers": self.max_workers,
            **addresses,
            "on_term": "leave",
            "join_timeout_s": JOIN_TIMEOUT_S,
            "keys": keys,
            "threads": self.resources[role].threads,
            **self.overrides,
        }
        values |= {"logdir": logdir} if logdir else {}
        # Any free port for metrics: another job's task may be on this host.
        variables = {"ZMQTRAIN_METRICS_PORT": "0"} | dict(self.variables)
        return {variable_of(name): text_of(value) for name, value in values.items()} | variables

    @property
    def leaders(self) -> list[Task]:
        """The tasks that listen: all ps, or, without ps, all workers."""
        return [Task(self.leader, index) for index in range(self.counts[self.leader])]

    def command(self, role: Role, *, supervised: bool = True) -> list[str]:
        """Return the command of a task, whose index the engine's variables say."""
        task = [self.python, "-m", "zmqtrain.roles.task", "--role", str(role)]
        return [self.python, "-m", "zmqtrain.cli.supervise", "--", *task] if supervised else task


def keys_of(keys: Mapping[str, str], *tasks: Task) -> dict[str, str]:
    """Return those of the files of keys that these tasks need; a revoked key has no secret.

    Without ps worker 0 hosts the chief, which has a key of its own.
    """
    owners = [Owner(task.role, task.index) for task in tasks]
    if Task(Role.WORKER, 0) in tasks and secret_name(Owner(Role.PS)) not in keys:
        owners.append(Owner(Role.CHIEF))
    names = (REGISTRY, *map(secret_name, owners))
    return {name: keys[name] for name in names if name in keys}


def port_of(number: int) -> int:
    """Return the port of ps 0 of the job of this number; the other ps have the next."""
    return FIRST_PORT + PORTS * (number % JOBS)


def plan_of(
    asked: Submission,
    reference: str,
    job: Job | None,
    name: str,
    overrides: Mapping[str, object],
    **more: Any,
) -> Plan:
    """Return the plan of a submission.

    ``reference``: the job as its tasks are told it. ``job``: the same, loaded; None: the
    submission says the ps's memory. ``more``: further fields of the plan.

    Raises:
        ConfigError: values do not fit together.
    """
    strategy = str(overrides.get("strategy", "auto" if job is None else job.strategy))
    cluster = Cluster(("",) * asked.ps, asked.workers)
    check(strategy, cluster)
    ps = 0 if is_on_workers(strategy, cluster) else asked.ps
    most = asked.max_workers or asked.workers
    if most < asked.workers:
        raise ConfigError(
            f"{names_of('max_workers')} is {most}; expected at least the {asked.workers} of "
            f"{names_of('workers')}"
        )
    if not ps and most > asked.workers:
        raise ConfigError(
            f"{names_of('max_workers')} is {most}, but without ps the number of workers is fixed, "
            "since each hosts a part; leave it out, or give at least one ps"
        )
    if asked.ps_memory is None and job is None:
        raise ConfigError(
            f"{names_of('ps_memory')} is not given, and the job was not loaded; give one of both"
        )
    shared, copies = asked.ps_memory or 0, 0
    if job is not None:
        planned = plan_for(job, spread_cluster(ps, most))
        shared = shared or _largest_segment(planned, most)
        copies = max(copies_nbytes(layout, planned.job) for layout in planned.layouts)
    return Plan(
        name=name,
        asked=asked,
        job=reference,
        ps=ps,
        workers=asked.workers,
        max_workers=most,
        resources=_resources(asked, shared, copies, most, hosted=not ps),
        overrides=overrides,
        **more,
    )


def _resources(
    asked: Submission, shared: int, copies: int, workers: int, *, hosted: bool
) -> dict[Role, Resources]:
    """Return the resources by role.

    ``shared``: bytes of the largest shard's segment. ``copies``: of copies of it, 0 if not known.
    """
    memory = asked.memory or 0
    process = PROCESS_NBYTES + workers * MESSAGES_NBYTES + copies
    if hosted:
        limit = memory + shared if memory else 0
        return {Role.WORKER: Resources(asked.cpu, limit, asked.gpu, shared)}
    return {
        Role.PS: Resources(asked.ps_cpu, process + shared, 0, shared),
        Role.CHIEF: Resources(CHIEF_CPU, memory),
        Role.WORKER: Resources(asked.cpu, memory, asked.gpu),
    }


def _largest_segment(plan: planning.Plan, workers: int) -> int:
    """Return the bytes of the largest segment with some room, in whole MiB."""
    update = plan.job.update()
    needed = (segment_layout(layout, update).nbytes(workers) for layout in plan.layouts)
    return -(-(max(needed) + SPARE_NBYTES) // MIB) * MIB


def name_for(reference: str, letters: Sequence[str]) -> str:
    """Return a unique name: the stem of the job's file and some random ``letters``."""
    stem = PurePath(reference.split(":")[0]).stem.rpartition(".")[2].lower()
    words = re.sub(r"[^a-z0-9]+", "-", stem).strip("-")
    base = words if words[:1].isalpha() else f"job-{words}"
    room = MAX_NAME - SUFFIX_LENGTH - 1
    return f"{base[:room].strip('-')}-{''.join(letters)}"
