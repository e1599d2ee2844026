"""Strategies: the tasks of a cluster that hold the parameters of a job. Pure.

``parameter-server``: on ps. ``multi-worker-mirrored``: on the workers, and no task is a ps.
``mirrored``: the same, one worker on several devices. ``auto``: on ps if the cluster has any.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from zmqtrain.config.cluster import Cluster, Role, Task
from zmqtrain.config.options import names_of
from zmqtrain.errors import ConfigError
from zmqtrain.job import Job

MIRRORED = "mirrored"
MULTI_WORKER_MIRRORED = "multi-worker-mirrored"
PARAMETER_SERVER = "parameter-server"


def check(strategy: str, cluster: Cluster) -> None:
    """Check that a cluster can train a job of this strategy.

    Raises:
        ConfigError: the strategy contradicts the cluster.
    """
    if strategy == PARAMETER_SERVER and not cluster.ps:
        raise ConfigError(
            f"{names_of('strategy')} is {strategy}, but {names_of('ps')} or TF_CONFIG gives no ps; "
            f"expected at least one; add it, or use {MULTI_WORKER_MIRRORED}"
        )
    if strategy == MIRRORED and cluster.workers > 1:
        raise ConfigError(
            f"{names_of('strategy')} is {MIRRORED}, which is one worker with several devices, but "
            f"{names_of('workers')} or TF_CONFIG gives {cluster.workers}; expected 1; correct it, "
            f"or use {MULTI_WORKER_MIRRORED}"
        )
    if is_on_workers(strategy, cluster):
        _check_addresses(cluster)


def is_on_workers(strategy: str, cluster: Cluster) -> bool:
    """Return whether the parameters live on workers."""
    return strategy in (MIRRORED, MULTI_WORKER_MIRRORED) or not cluster.ps


def worker_addresses(cluster: Cluster) -> tuple[str, ...]:
    """Return where the workers of a cluster listen if the parameters live on them.

    A chief with an address is worker 0, as in TensorFlow. By default workers are on this host.
    """
    chief = (cluster.chief_address,) if cluster.chief_address else ()
    given = chief + cluster.worker_addresses
    if any(given):
        return given
    return tuple(f"127.0.0.1:{cluster.base_port + index}" for index in range(cluster.workers))


def _check_addresses(cluster: Cluster) -> None:
    given = cluster.worker_addresses or ("",) * cluster.workers
    if len(given) != cluster.workers:
        raise ConfigError(
            f"{names_of('workers')} is {cluster.workers}, but TF_CONFIG lists {len(given)} "
            f"workers; expected {cluster.workers}; correct one of them"
        )
    listed = worker_addresses(replace(cluster, worker_addresses=given))
    if not all(listed):
        raise ConfigError(
            f"TF_CONFIG lists {', '.join(filter(None, listed))}, but not all workers; expected an "
            "address for each, since without ps all of them listen; add the others"
        )
    if twice := [address for address in listed if listed.count(address) > 1]:
        raise ConfigError(
            f"{names_of('workers')} or TF_CONFIG lists {twice[0]} twice; expected a different "
            "address for each worker, since without ps all of them listen; correct one"
        )


def task_under(strategy: str, task: Task, cluster: Cluster) -> Task:
    """Return which task a task of this cluster is under a job's strategy.

    Raises:
        ConfigError: there is no such task, or the strategy contradicts the cluster.
    """
    check(strategy, cluster)
    if not is_on_workers(strategy, cluster):
        return task
    if task.role is Role.PS:
        raise ConfigError(
            f"this task was started as a ps, but by {names_of('strategy')} each worker hosts one; "
            "do not start this task"
        )
    if cluster.chief_address:
        return Task(Role.WORKER, 0 if task.role is Role.CHIEF else task.index + 1)
    if task.role is Role.CHIEF and not cluster.chief:
        raise ConfigError(
            "this task was started as a chief, but without ps worker 0 hosts it unless "
            f"{names_of('chief')} is given; do not start this task, or give every task --chief"
        )
    return task


def is_mirrored(job: Job, *, alone: bool) -> bool:
    """Return whether one worker trains the job on its devices; ``alone``: no cluster is given."""
    return job.strategy == MIRRORED or (job.strategy == "auto" and bool(job.devices) and alone)


def spread_cluster(ps: int, workers: int) -> Cluster:
    """Return a cluster whose tasks are on different hosts; ps 0: workers hold the shards."""
    hosts = tuple(f"host-{index}:2222" for index in range(ps or workers))
    return Cluster(hosts if ps else (), workers, worker_addresses=() if ps else hosts)


def local_cluster(
    strategy: str, ps: int | None, workers: int, address: Callable[[int], str] = lambda _: ""
) -> Cluster:
    """Return a cluster of this host with a chief of its own.

    ``ps``: requested number; None: as the strategy needs. ``address``: that of shard i's task.

    Raises:
        ConfigError: the strategy contradicts the number of ps or workers.
    """
    count = int(strategy in ("auto", PARAMETER_SERVER)) if ps is None else ps
    if ps and strategy in (MIRRORED, MULTI_WORKER_MIRRORED):
        raise ConfigError(
            f"{names_of('strategy')} is {strategy}, which has no ps, but {names_of('ps')} is {ps}; "
            f"expected 0; leave it out, or use {PARAMETER_SERVER}"
        )
    holders = tuple(map(address, range(count or workers)))
    found = Cluster(holders if count else (), workers, True, () if count else holders)
    check(strategy, found)
    return found
