"""The plan by which the tasks of a cluster train a job: decided once, by one pure function.

Every task computes the same plan from the same options, so no message has to carry it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial

from zmqtrain.config.cluster import IPC, Cluster, Role, Task, connect_endpoint
from zmqtrain.config.options import names_of
from zmqtrain.config.task import TaskConfig
from zmqtrain.fingerprint import WORKERS
from zmqtrain.job import Job
from zmqtrain.models.tables import RowPlace
from zmqtrain.planning import strategy
from zmqtrain.planning.exchanges import DIRECT, ExchangeKind, Site, exchange_at
from zmqtrain.planning.job_fingerprint import job_fingerprint
from zmqtrain.planning.obstacles import check
from zmqtrain.store.layout import ShardLayout
from zmqtrain.store.placement import place, with_copies
from zmqtrain.transport.keys import Owner
from zmqtrain.transport.security import Security

MIRRORED_POLICY = "sync-replicas"
"""The policy of a job that names none, if workers hold the parameters."""


@dataclass(frozen=True)
class Plan:
    """The plan that all tasks of a job agree on.

    ``job``: the job, with the policy and the placement in effect.
    ``ps``: address of the task that holds shard 0, 1, ...
    ``workers``: number of workers that take part; ``most_workers``: of those that may later.
    ``has_chief``: whether the chief is a task of its own; if not, the first worker hosts it.
    ``exchange``: how gradients become parameters; ``copies``: how many tasks hold each slice.
    ``members``: the workers that take part, if the parameters live on workers: the first ones hold
    shard 0, 1, ...; else empty.
    ``worker_addresses``: where all workers listen, as far as that is known.
    ``group``: number of the group of workers; 0: the job ends if one is lost for good.
    ``remedy``: advice to a person if a ps is missing, as the end of a sentence.
    """

    job: Job
    ps: tuple[str, ...]
    workers: int
    most_workers: int
    has_chief: bool
    exchange: ExchangeKind
    copies: int
    members: tuple[int, ...] = ()
    worker_addresses: tuple[str, ...] = ()
    group: int = 0
    remedy: str = ""

    @property
    def shards(self) -> int:
        return len(self.ps)

    @property
    def is_on_workers(self) -> bool:
        """Whether workers hold the shards, so that no task is a ps."""
        return bool(self.members)

    @property
    def hosts(self) -> tuple[int, ...]:
        """The workers that hold shard 0, 1, ...; empty if ps do."""
        return self.members[: self.shards]

    @property
    def strategy(self) -> str:
        """The strategy that trains the job; never "auto"."""
        if not self.is_on_workers:
            return strategy.PARAMETER_SERVER
        is_mirrored = self.job.devices and self.workers == 1
        return strategy.MIRRORED if is_mirrored else strategy.MULTI_WORKER_MIRRORED

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses that identify the job on its hosts: of its ps, or of all workers."""
        return self.worker_addresses if self.is_on_workers else self.ps

    @property
    def is_of_one_run(self) -> bool:
        """Whether all tasks belong to one command on this host, which ends them together."""
        return self.ps[0].startswith(IPC)

    @property
    def hands_over(self) -> bool:
        """Whether the tasks save the copies of a part that is lost with its holder's memory."""
        return self.copies > 1 and self.job.logdir is not None

    @property
    def tasks(self) -> tuple[Task, ...]:
        """All tasks that the job begins with: chief, ps, workers."""
        ps = 0 if self.is_on_workers else self.shards
        counts = {Role.CHIEF: int(self.has_chief), Role.PS: ps, Role.WORKER: self.workers}
        return tuple(Task(role, index) for role, count in counts.items() for index in range(count))

    @cached_property
    def layouts(self) -> tuple[ShardLayout, ...]:
        """The layout of each shard.

        If each shard holds everything, no variable is cut, as on a single ps. Variables whose rules
        look at whole variables are never cut.
        """
        job, shards = self.job, self.shards
        copied = partial(with_copies, copies=self.copies, has_tables=bool(job.table_variables()))
        if self.copies == shards > 1:
            return copied(place(job.variables(), shards, "contiguous", 0))
        whole = job.update().whole(variable.name for variable in job.variables())
        return copied(place(job.variables(), shards, job.placement, job.partition_nbytes, whole))

    def row_place(self, shard: int) -> RowPlace:
        """Return which rows of tables a shard holds."""
        return RowPlace(shard, self.shards, self.copies)

    def fingerprint(self) -> dict[str, str]:
        """Return the texts that must be equal on every task.

        A task that loads the data adds an entry :data:`~zmqtrain.fingerprint.DATA`.
        """
        job = self.job
        placement = f"{job.placement}, {job.partition_nbytes} B parts, {self.shards} ps"
        placement += f", {self.copies} copies" * (self.copies > 1)
        workers = {WORKERS: str(self.workers)} if self.is_on_workers else {}
        return job_fingerprint(job) | {"placement": placement} | workers

    def shard_of(self, task: Task) -> int | None:
        """Return which shard a task holds, None if it holds none."""
        if task.role is Role.PS:
            return task.index
        is_host = task.role is Role.WORKER and task.index in self.hosts
        return self.hosts.index(task.index) if is_host else None

    def hosts_chief(self, task: Task) -> bool:
        """Return whether the chief runs in the process of this task."""
        if self.has_chief:
            return task.role is Role.CHIEF
        return task == Task(Role.WORKER, self.members[0] if self.members else 0)

    def address_of(self, task: Task) -> str:
        """Return where a worker listens, in this group or in a later one; "" if it does not."""
        known = self.worker_addresses if self.is_on_workers and task.role is Role.WORKER else ()
        return known[task.index] if task.index < len(known) else ""

    def owner_of(self, role: str, index: int) -> Owner:
        """Return the owner of a task's key: a ps or chief that a worker hosts has that worker's."""
        hosted: dict[str, int] = {Role.PS: len(self.members), Role.CHIEF: int(not self.has_chief)}
        if self.members and 0 <= index < hosted.get(role, 0):
            return Owner(Role.WORKER, self.members[index])
        return Owner(role, index)

    def security(self, config: TaskConfig) -> Security:
        """Return the key of a task, and the keys that it expects at the addresses of shards."""
        return config.security(
            self.owner_of(config.role, config.index),
            {
                connect_endpoint(address): self.owner_of(Role.PS, index)
                for index, address in enumerate(self.ps)
            },
        )

    def in_group(self, number: int, members: tuple[int, ...]) -> Plan:
        """Return the plan of a later group of workers, in which shards are cut anew."""
        shards = self.exchange.shards(self._site(len(members)))
        return replace(
            self,
            group=number,
            members=members,
            ps=tuple(self.worker_addresses[worker] for worker in members[:shards]),
            workers=len(members),
            copies=self.exchange.copies(self._site(len(members)), shards),
        )

    def among_workers(self) -> Plan:
        """Return a plan by which a worker reaches all others, as it reaches the shards in this."""
        everyone = tuple(range(len(self.worker_addresses)))
        return replace(self, group=1, members=everyone, ps=self.worker_addresses)

    def with_own_model(self) -> Plan:
        """Return this plan with a copy of the model, for another thread of this process."""
        return replace(self, job=self.job.with_own_model())

    def _site(self, workers: int) -> Site:
        return Site(self.job, workers, self.worker_addresses, self.is_on_workers)


def plan_for(job: Job, cluster: Cluster, *, lane: str = "auto", crash_safe: bool = True) -> Plan:
    """Return how the tasks of a cluster train a job.

    ``lane`` and ``crash_safe``: as all tasks are given them.

    Raises:
        ConfigError: the job's strategy, exchange or copies contradict the cluster.
    """
    strategy.check(job.strategy, cluster)
    on_workers = strategy.is_on_workers(job.strategy, cluster)
    listed = strategy.worker_addresses(cluster) if on_workers else cluster.worker_addresses
    workers = len(listed) if on_workers else cluster.workers
    job = as_trained(job, on_workers=on_workers)
    site = Site(
        job=job,
        workers=workers,
        addresses=listed if on_workers else cluster.ps,
        on_workers=on_workers,
        lane=lane,
        crash_safe=crash_safe,
    )
    check(job, workers)
    exchange = exchange_at(site)
    shards = exchange.shards(site) if on_workers else len(cluster.ps)
    may_do_without_ps = bool(cluster.worker_addresses) and not on_workers
    return Plan(
        job,
        ps=site.addresses[:shards],
        workers=workers,
        most_workers=max(workers, cluster.max_workers, len(listed)),
        has_chief=_has_chief(cluster, on_workers=on_workers),
        exchange=exchange,
        copies=exchange.copies(site, shards) if on_workers else 1,
        members=tuple(range(workers)) if on_workers else (),
        worker_addresses=listed,
        remedy=WITHOUT_PS if may_do_without_ps else "",
    )


def plan_task(config: TaskConfig, job: Job) -> tuple[TaskConfig, Plan]:
    """Return the configuration of a task as the plan of its job numbers it, and that plan.

    Raises:
        ConfigError: the job cannot be trained by this cluster, or has no such task.
    """
    task = strategy.task_under(job.strategy, config.task, config.cluster)
    plan = plan_for(job, config.cluster, lane=config.lane, crash_safe=config.crash_safe)
    return config.of(task), plan


WITHOUT_PS = (
    "; start it or, to train without ps, give all tasks "
    f"{names_of('strategy', strategy.MULTI_WORKER_MIRRORED)}"
)
"""Advice if a ps is missing: a tutorial's TF_CONFIG may list one that nobody starts."""


def plan_alone(job: Job) -> Plan:
    """Return how one worker trains a job by itself, in this process."""
    job = as_trained(job, on_workers=strategy.is_mirrored(job, alone=True))
    check(job)
    return Plan(job, (f"{IPC}alone",), 1, 1, has_chief=True, exchange=DIRECT, copies=1)


def as_trained(job: Job, *, on_workers: bool) -> Job:
    """Return a job with the policy and the placement that count where its parameters live.

    On workers both have other defaults. With ``overlap`` each variable is cut for all shards, so
    that the first gradients that are complete have many receivers.
    """
    if not on_workers:
        return job
    found = {"policy": MIRRORED_POLICY} | ({} if job.overlap else {"placement": "contiguous"})
    unset = found.keys() - job.model_fields_set
    return job.model_copy(update={name: found[name] for name in unset})


def _has_chief(cluster: Cluster, *, on_workers: bool) -> bool:
    if on_workers:
        return bool(cluster.chief) and not cluster.chief_address
    return cluster.chief is not False
