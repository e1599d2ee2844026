"""The tasks of a submitted job and their resources, for any engine. Pure.

A Submission has the user's options; a :class:`SubmitPlan` adds the requirements of the job.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from zmqtrain.clusters.submission import CHIEF_CPU, MAX_NAME, Submission
from zmqtrain.clusters.submitted import WithTasks
from zmqtrain.config.cluster import Cluster, Role, Task
from zmqtrain.config.options import names_of, text_of, variable_of
from zmqtrain.config.restarts import Advice, advice
from zmqtrain.errors import ConfigError, ExitCode
from zmqtrain.job import Job
from zmqtrain.planning import plan as planning
from zmqtrain.planning.plan import plan_for
from zmqtrain.planning.strategy import check, is_on_workers, spread_cluster
from zmqtrain.server.shard_memory import copies_nbytes
from zmqtrain.store.shard import segment_layout
from zmqtrain.transport.keys import REGISTRY, Owner, secret_name
from zmqtrain.wire.chunks import MESSAGES_NBYTES

SUFFIX_LENGTH = 4
LETTERS = "bcdfghjkmnpqrstvwxz23456789"
"""Letters of a name's random part: they spell no word, and no two of them look alike."""

MIB = 1 << 20
PROCESS_NBYTES = 1 << 30
"""Memory of a ps beside its parameters, copies and messages: Python, the job's framework."""

SPARE_NBYTES = 16 * MIB
"""Room in /dev/shm beside the segment: a pod that needs a byte more is evicted."""

GRACE_S = 60
"""Seconds from SIGTERM to SIGKILL, in which a ps has a checkpoint saved."""

JOIN_TIMEOUT_S = 3600
"""The time that a task waits for another one to start, which may be pending or pulling its image.
Giving up is permanent, and `why` shows meanwhile why the engine waits."""

PERMANENT = tuple(int(code) for code in ExitCode if advice(code) is Advice.NO)
"""Exit codes after which an engine does not start a task again."""

ENDED = tuple(int(code) for code in ExitCode if advice(code) is not Advice.YES)
"""The same, and those of a task that is done or was stopped; after other codes a task is restarted
in place."""

FIRST_PORT, PORTS, JOBS = 20000, 32, 375
"""Each job on a host has its own range of ports, below those that Linux assigns."""

FIRST_METRICS_PORT = FIRST_PORT + PORTS * JOBS
"""Each job has one for the metrics of ps 0, which lists those of all tasks."""

METRICS_PORT = variable_of("metrics_port")


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources of a task; ``memory_nbytes`` 0: no limit; ``shared_nbytes``: in /dev/shm."""

    cpu: float = 1.0
    memory_nbytes: int = 0
    gpu: float = 0
    shared_nbytes: int = 0

    @property
    def threads(self) -> int:
        """The CPUs as a whole number, for threads, and for engines that give no fractions."""
        return math.ceil(self.cpu)


@dataclass(frozen=True, slots=True)
class SubmitPlan(WithTasks):
    """The tasks of a job and their needs.

    ``asked``: the submission, for the options of its engine. ``job``: its reference for the tasks.
    ``overrides``: fields of the job, by name. ``logdir``: as the user gave it, which each engine
    reads in its own way. ``keys``: text of each file of the directory of keys, by name;
    ``keys_directory``: that directory on this host. ``variables``: further variables of every task.
    ``python``: the tasks' interpreter. ``working``: where the job is submitted, and where they
    start if they have our paths. ``words``: see :class:`Submitted`.
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
    words: tuple[str, ...] = ()

    def environment(
        self, role: Role, listening: Sequence[str], keys: str, logdir: str | None
    ) -> dict[str, str]:
        """Return the variables of the tasks of a role.

        ``listening``: addresses of all ps, or, without ps, of all workers; empty if the engine's
        own variables or scripts set them. ``keys``, ``logdir``: where a task finds them.
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
        # Any free port: another job's task may be on this host. Prometheus is on another one.
        metrics = {"ZMQTRAIN_METRICS_HOST": "0.0.0.0", METRICS_PORT: "0"}
        variables = metrics | dict(self.variables)
        return {variable_of(name): text_of(value) for name, value in values.items()} | variables

    @property
    def leaders(self) -> list[Task]:
        """The tasks that listen: all ps, or, without ps, all workers."""
        return [task for task in self.tasks if task.role is self.leader.role]

    def metrics_flags(self, port: object) -> str:
        """Return the words that have ps 0 serve metrics at a port, unless a variable names one."""
        return "" if METRICS_PORT in self.variables else f" --metrics-port {port}"

    def command(self, role: Role, *, supervised: bool = True) -> list[str]:
        """Return the command of a task; the engine's variables give its index."""
        task = [self.python, "-m", "zmqtrain.roles.task", "--role", str(role)]
        return [self.python, "-m", "zmqtrain.cli.supervise", "--", *task] if supervised else task


def keys_of(keys: Mapping[str, str], *tasks: Task) -> dict[str, str]:
    """Return the files of keys that these tasks need; a revoked key has no secret.

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
) -> SubmitPlan:
    """Return the plan of a submission.

    ``reference``: the job's reference for its tasks. ``job``: the loaded job; None if the
    submission gives the memory of a ps. ``more``: further fields of the plan.

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
    if not ps and asked.ps_gpu:
        raise ConfigError(
            f"{names_of('ps_gpu')} is {asked.ps_gpu}, but the job has no ps; expected GPUs of "
            f"workers, by {names_of('gpu')}; leave it out"
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
    return SubmitPlan(
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

    ``shared``: bytes of the largest shard's segment. ``copies``: bytes of its copies, 0 if unknown.
    """
    memory = asked.memory or 0
    process = PROCESS_NBYTES + workers * MESSAGES_NBYTES + copies
    if hosted:
        limit = memory + shared if memory else 0
        return {Role.WORKER: Resources(asked.cpu, limit, asked.gpu, shared)}
    return {
        Role.PS: Resources(asked.ps_cpu, process + shared, asked.ps_gpu, shared),
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
