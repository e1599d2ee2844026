"""Where parameters live: which tasks a job's strategy makes of a cluster. Pure.

``parameter-server``: on ps. ``multi-worker-mirrored``: on the workers, each of which hosts a ps, so
that no task of that role is started. ``mirrored``: the same with one worker, which has several
devices. ``auto``: on ps if the cluster has any. With a board there is one ps, which worker 0 hosts
if no task is one.
"""

from __future__ import annotations

from dataclasses import replace

from zmqtrain import policies
from zmqtrain.config.cluster import Cluster, Role, Task, is_of_this_host
from zmqtrain.config.options import names_of
from zmqtrain.errors import ConfigError
from zmqtrain.job import Job
from zmqtrain.policies.base import Lockstep

MIRRORED = "mirrored"
MULTI_WORKER_MIRRORED = "multi-worker-mirrored"
PARAMETER_SERVER = "parameter-server"


def plan(strategy: str, cluster: Cluster) -> Cluster:
    """Return the cluster that trains a job of this strategy.

    A chief that has an address computes, as in TensorFlow: it is worker 0, which hosts the chief.
    An address "" is one of this host.

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
    if strategy in ("auto", PARAMETER_SERVER) and cluster.ps:
        return cluster
    members = cluster.members or ("",) * cluster.workers
    if len(members) != cluster.workers:
        raise ConfigError(
            f"{names_of('workers')} is {cluster.workers}, but TF_CONFIG lists {len(members)} "
            f"workers; expected {cluster.workers}; correct one of them"
        )
    if cluster.chief_address:
        members = (cluster.chief_address, *members)
    if any(members) and not all(members):
        raise ConfigError(
            f"TF_CONFIG lists {', '.join(filter(None, members))}, but not all workers; expected an "
            "address for each, since without ps all of them listen; add the others"
        )
    if twice := [address for address in members if address and members.count(address) > 1]:
        raise ConfigError(
            f"{names_of('workers')} or TF_CONFIG lists {twice[0]} twice; expected a different "
            "address for each worker, since without ps all of them listen; correct one"
        )
    chief = cluster.chief and not cluster.chief_address
    return Cluster(members, len(members), chief, hosted=True)


def member(task: Task, cluster: Cluster) -> Task:
    """Return which task of the plan without ps a task of this cluster is.

    Raises:
        ConfigError: it is none.
    """
    if task.role is Role.PS:
        raise ConfigError(
            f"this task was started as a ps, but by {names_of('strategy')} each worker hosts one; "
            "do not start this task"
        )
    if not cluster.chief_address:
        return task
    return Task(Role.WORKER, 0 if task.role is Role.CHIEF else task.index + 1)


def instead_of_ps(cluster: Cluster) -> str:
    """Return what to do if a ps is not there, in a planned cluster whose workers can do without.

    A tutorial's TF_CONFIG may list one beside the workers in vain.
    """
    if cluster.hosted or not cluster.members:
        return ""
    return (
        "; start it or, if the workers shall hold the parameters themselves, give all tasks "
        f"--strategy {MULTI_WORKER_MIRRORED}"
    )


def with_exchange(
    planned: Cluster, job: Job, *, lane: str = "auto", crash_safe: bool = True
) -> Cluster:
    """Return the planned cluster with a board, if that is the job's exchange.

    ``lane`` and ``crash_safe``: as all tasks are given them.

    Raises:
        ConfigError: it shall be, but cannot.
    """
    _check_copies(planned, job)
    _check_loss(planned, job)
    exchange = job.exchange_of_workers
    if exchange in ("direct", "to-one", "one-shot") or (exchange == "auto" and not planned.hosted):
        if exchange == "to-one" and len(planned.ps) > 1 and not planned.hosted:
            raise ConfigError(
                f"{names_of('exchange')} is to-one, but there are {len(planned.ps)} ps; expected "
                "one, or workers without ps; correct that, or use direct"
            )
        return planned
    found = job.hosted(planned.hosted).obstacles_to_board()
    found += ["lane is tcp"] * (lane == "tcp") + ["crash_safe is off"] * (not crash_safe)
    found += [f"{far} may be on another host" for far in planned.ps if not is_of_this_host(far)]
    if len(planned.ps) > 1 and not planned.hosted:
        found.append(f"there are {len(planned.ps)} ps instead of one")
    if not found:
        return replace(planned, ps=planned.ps[:1], board=True)
    if exchange == "auto":
        return planned
    raise ConfigError(
        f"{names_of('exchange')} is board, but {'; '.join(found)}; correct that, or use direct"
    )


def _check_loss(planned: Cluster, job: Job) -> None:
    """Check that the mean over workers is what the loss of all their batches would give.

    Raises:
        ConfigError: the loss is known to add up over its batch.
    """
    is_mean = isinstance(policies.make_policy(job.policy), Lockstep)
    if planned.workers > 1 and is_mean and getattr(job.model, "loss_adds_up", False):
        raise ConfigError(
            f"the loss of {job.model!r} adds up over its batch, and a step takes the mean over "
            f"{planned.workers} workers, so that it would be {planned.workers} times too small; "
            "expected the mean over a batch: leave out reduction='sum'"
        )


def _check_copies(planned: Cluster, job: Job) -> None:
    """Check that parts can have the copies that the job asks for.

    Raises:
        ConfigError: they cannot.
    """
    if job.copies == 1 and job.exchange != "one-shot":
        return
    shown = f"{names_of('copies')} is {job.copies}"
    if job.exchange == "one-shot":
        shown = f"{names_of('exchange')} is one-shot"
    if not planned.hosted:
        raise ConfigError(
            f"{shown}, but there are ps; expected workers that host the parts, whose hosts may be "
            "lost; leave it out, or give --ps 0"
        )
    if found := job.hosted(True).obstacles_to_copies(planned.workers):
        raise ConfigError(f"{shown}, but {'; '.join(found)}; correct that, or leave it out")


def strategy_of(job: Job, workers: int, *, hosted: bool) -> str:
    """Return by which strategy so many workers train the job; ``hosted``: they host the ps."""
    if not hosted:
        return PARAMETER_SERVER
    return MIRRORED if job.devices and workers == 1 else MULTI_WORKER_MIRRORED


def exchange_of(job: Job, *, board: bool) -> str:
    """Return by which exchange gradients become parameters; ``board``: workers have one."""
    asked = job.exchange_of_workers
    return "board" if board else {"auto": "direct"}.get(asked, asked)


def is_mirrored(job: Job, *, alone: bool) -> bool:
    """Say whether one worker trains the job on its devices; ``alone``: no cluster is given."""
    return job.strategy == MIRRORED or (job.strategy == "auto" and bool(job.devices) and alone)


def local_ps(strategy: str, ps: int | None, workers: int) -> int:
    """Return how many ps a cluster of this host has, of which ``ps`` were asked for.

    Raises:
        ConfigError: the strategy contradicts the number.
    """
    planned = plan(strategy, Cluster(("",) * (1 if ps is None else ps), workers, chief=True))
    if planned.hosted and ps:
        raise ConfigError(
            f"{names_of('strategy')} is {strategy}, which has no ps, but {names_of('ps')} is {ps}; "
            f"expected 0; leave it out, or use {PARAMETER_SERVER}"
        )
    return 0 if planned.hosted else len(planned.ps)
