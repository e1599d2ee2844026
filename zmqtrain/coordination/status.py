"""The leader's status of the job: tasks, figures and waits."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from zmqtrain.config.cluster import Role
from zmqtrain.coordination import waiting
from zmqtrain.coordination.coordinator import Coordinator
from zmqtrain.coordination.endings import ending
from zmqtrain.coordination.figures import PassFigures
from zmqtrain.coordination.leader import Leader
from zmqtrain.coordination.peers import A_WORKER, Peer, names_of
from zmqtrain.coordination.statistics import Staleness, Throughput
from zmqtrain.job import Job
from zmqtrain.job_checks import ENDLESS
from zmqtrain.policies import Held
from zmqtrain.protocol.status import State, Status, TableStatuses, TaskStatus, Wait, of_all_shards

SILENT_BEATS = 2.5  # missed heartbeats after which a task is silent
COUNTED = "applied", "dropped", "refused"  # pushes
PASSING_S = 0.5  # a shorter wait is that for a push under way: the worker computes


@dataclass(slots=True)
class HostStatus:
    """The status of the leader's own host."""

    task: TaskStatus
    waits: tuple[Wait, ...]
    duplicates: int  # repeated requests of workers
    started_at: float  # of the monotonic clock
    tables: TableStatuses = field(default_factory=dict)  # the rows that its shard holds


def status_of(
    leader: Leader,
    host: HostStatus,
    *,
    event: int,
    save_wanted: bool,
    stop_wanted: bool,
    save_failure: str = "",
) -> Status:
    coordinator = leader.coordinator
    reported = (peer.report.tables for peer in leader.peers if peer.report is not None)
    following, behind = coordinator.next_policy, waiting.behind(coordinator)
    throughput, staleness = leader.figures.throughput, leader.figures.staleness
    return Status(
        event=event,
        initialised=leader.has_begun,
        policy=leader.policy,
        switching=following.spec if following is not None else "",
        steps=leader.job.steps if leader.job.steps < ENDLESS else 0,
        failure=leader.failure,
        failure_code=leader.failure_code,
        all_delivered=leader.all_delivered,
        save_wanted=save_wanted,
        stop_wanted=stop_wanted,
        loss=leader.figures.loss,
        tasks=(host.task, *(_task(leader, peer, behind) for peer in _in_order(leader))),
        waits=waits_of(leader, host),
        rosters=coordinator.rosters,
        group=leader.plan.group,
        group_members=leader.plan.members if leader.plan.group else (),
        strategy=leader.plan.strategy,
        exchange=leader.plan.exchange.name,
        save_failure=save_failure,
        tables=of_all_shards((host.tables, *reported), leader.plan.copies),
        rounds=leader.figures.rounds,
        agreement=leader.figures.agreement,
        epoch_batches=leader.epoch_batches,
        **figures_of(leader.job, coordinator, throughput, staleness, duplicates=host.duplicates),
    )


def figures_of(
    job: Job,
    coordinator: Coordinator,
    throughput: Throughput,
    staleness: Staleness,
    *,
    duplicates: int = 0,
) -> dict[str, Any]:
    """Return the fields of a :class:`Status` that jobs of all kinds count alike."""
    stop, stop_code = ending(coordinator, job.steps)
    pushes = {name: getattr(coordinator, name) for name in COUNTED}
    return {
        "stop": stop,
        "stop_code": stop_code,
        "seconds": throughput.seconds,
        "steps_per_second": throughput.steps_per_second,
        "idle_s": throughput.idle_s(time.monotonic()),
        "examples": coordinator.ledger.examples,
        "pushes": pushes | {"duplicate": duplicates},
        "staleness": staleness.summary(),
        "epochs": job.epochs,
        **asdict(PassFigures.of(coordinator)),
    }


def waits_of(leader: Leader, host: HostStatus) -> tuple[Wait, ...]:
    """Return all waits: of the leader's host, in heartbeats, and by the policy.

    A wait for a silent task, without a deadline of its own, ends when that task is given up.
    """
    present = [peer for peer in leader.peers if not peer.gone]
    waits = [*host.waits, *(wait for peer in present for wait in peer.waits)]
    if not leader.has_begun:
        since_s = time.monotonic() - host.started_at
        until_s = max(0.0, leader.timing.join_timeout_s - since_s)
        reason = "no chief has initialised the parameters"
        waits.append(Wait(host.task.task, "chief 0", reason, since_s, until_s))
    else:
        waits += _held(leader)
        if not leader.coordinator.members and not leader.coordinator.finished:
            since_s = time.monotonic() - leader.peopled_at
            until_s = max(0.0, leader.timing.join_timeout_s - since_s)
            waits.append(Wait(host.task.task, A_WORKER, "no worker is alive", since_s, until_s))
    timing = leader.timing
    patience_s = {str(Role.WORKER): timing.lease_s, str(Role.PS): timing.peer_timeout_s}
    given_up_in_s = {
        str(peer): max(0.0, patience_s.get(peer.role, timing.join_timeout_s) - peer.silent_s)
        for peer in present
        if _is_silent(leader, peer)
    }
    return tuple(_with_deadline(wait, given_up_in_s) for wait in waits)


def _held(leader: Leader) -> Iterator[Wait]:
    coordinator, now = leader.coordinator, time.monotonic()
    silent = [peer for peer in leader.peers.workers() if _is_silent(leader, peer)]
    # The last of them to be given up ends the wait.
    first = [peer.index for peer in sorted(silent, key=lambda peer: peer.silent_s)]
    if coordinator.is_pass_over:
        reason = "the epoch is over"
        if not coordinator.ledger.uncounted:
            reason = "the first epoch has not begun"
        for worker in coordinator.workers_by_state["starved"]:
            since_s = now - leader.waiting_since.get(worker, now)
            yield Wait(f"worker {worker}", "chief 0", reason, since_s, None)
    for held in waiting.held(coordinator):
        since_s = now - leader.waiting_since.get(held.worker, now)
        # Workers that are alive may take their time; leases bound the others.
        is_alive = waiting.is_alive(coordinator, held.by)
        left_s = None if is_alive else max(0.0, leader.timing.join_timeout_s - since_s)
        on, reason = _awaited(coordinator, held, first)
        yield Wait(f"worker {held.worker}", on, reason, since_s, left_s)


def _awaited(coordinator: Coordinator, held: Held, first: Sequence[int]) -> tuple[str, str]:
    """Return the awaited workers, or ps that lack a push, and the reason."""
    lacking = waiting.lacking(coordinator, held.by)
    if not lacking:
        return names_of(held.by, first) or A_WORKER, held.reason
    computing = [worker for worker in held.by if worker not in lacking]
    shards = sorted({shard for each in lacking.values() for shard in each})
    names = [names_of(computing, first), *(f"ps {shard}" for shard in shards)]
    reason = f"{held.reason}; the push of {names_of([*lacking])} has not arrived everywhere"
    return ", ".join(filter(None, names)), reason


def _with_deadline(wait: Wait, given_up_in_s: Mapping[str, float]) -> Wait:
    silent = [given_up_in_s[name] for name in wait.peer.split(", ") if name in given_up_in_s]
    return replace(wait, until_s=max(silent)) if silent and wait.until_s is None else wait


def _is_silent(leader: Leader, peer: Peer) -> bool:
    return peer.silent_s > SILENT_BEATS * leader.timing.heartbeat_s


def _in_order(leader: Leader) -> list[Peer]:
    ranks = {Role.PS: 0, Role.CHIEF: 1, Role.WORKER: 2}
    return sorted(leader.peers, key=lambda peer: (ranks[Role(peer.role)], peer.index))


def _task(leader: Leader, peer: Peer, behind: Mapping[int, int]) -> TaskStatus:
    leases: tuple[int, ...] = ()
    if peer.is_worker:
        leases = tuple(leader.coordinator.ledger.leases.get(peer.index, ()))
    return TaskStatus(
        role=peer.role,
        index=peer.index,
        state=_state(leader, peer),
        incarnation=peer.incarnation,
        step=_step(peer),
        silent_s=peer.silent_s,
        leases=leases,
        loss=peer.loss,
        process=peer.process,
        metrics=peer.metrics,
        lanes="" if peer.role == Role.PS else peer.lanes,
        nbytes=peer.report.nbytes if peer.report is not None else 0,
        restarts=peer.restarts,
        phases_s=peer.phases_s,
        progress=peer.progress,
        staleness=peer.staleness.summary()["mean"],
        behind=behind.get(peer.index) if peer.is_worker and not peer.gone else None,
    )


def _step(peer: Peer) -> int:
    if peer.is_worker:
        return peer.pushes
    return peer.report.version if peer.report is not None else peer.saved_step


def _state(leader: Leader, peer: Peer) -> State:
    if peer.gone:
        return "left"
    if _is_silent(leader, peer):
        return "silent"
    if not peer.is_worker or not leader.has_begun:
        return "alive"
    member = leader.coordinator.members.get(peer.index)
    if member is None:
        return "joining"
    if member.state == "stopped":
        return "done"
    waits = member.state != "computing" or any(wait.since_s >= PASSING_S for wait in peer.waits)
    return "waiting" if waits else "computing"
