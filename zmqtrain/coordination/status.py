"""What the leader tells of the job: tasks, figures, and who waits for whom."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from zmqtrain.config.cluster import Role
from zmqtrain.coordination.membership import Peer
from zmqtrain.wire.messages import State, Status, TaskStatus, Wait

if TYPE_CHECKING:
    from zmqtrain.coordination.leader import Leader


def status_of(leader: Leader) -> Status:
    """Return the job's status as of now."""
    ps, coordinator = leader.ps, leader.coordinator
    ps.executor.count()
    finished = coordinator is not None and coordinator.finished
    following = coordinator.next_policy if coordinator is not None else None
    pushes = leader.counts | {"duplicate": ps.receiver.duplicates}
    return Status(
        event=leader.admin.event,
        initialised=ps.initialised,
        policy=leader.policy,
        switching=following.spec if following is not None else "",
        step=leader.step,
        steps=ps.job.steps,
        stop=completion(leader.step, ps.job.steps) if finished else "",
        failure=leader.failure,
        failure_code=leader.failure_code,
        all_delivered=leader.all_delivered,
        save_wanted=bool(leader.admin.save_requests),
        stop_wanted=leader.admin.stop_wanted,
        seconds=leader.throughput.seconds,
        steps_per_second=leader.throughput.steps_per_second,
        loss=leader.loss,
        examples=coordinator.ledger.examples if coordinator is not None else 0,
        pushes=pushes,
        staleness=leader.staleness.summary(),
        tasks=(_own(leader), *(_task(leader, peer) for peer in _in_order(leader))),
        waits=waits_of(leader),
    )


def completion(step: int, steps: int) -> str:
    """Return why no more gradients are needed."""
    if step > steps:  # as the checkpoint was that the job went on from
        return f"step {step} was reached before, and {steps} are asked for: raise --steps"
    return f"step {step} of {steps} is done"


def divergence(refused: int, allowed: int) -> str:
    """Return why a job ends that has refused so many gradients; "" if it goes on."""
    if refused <= allowed:
        return ""
    return (
        f"{refused} gradients held NaN or infinity, the job allows {allowed}: lower the learning "
        "rate, set clip_norm, or raise max_nonfinite"
    )


def waits_of(leader: Leader) -> tuple[Wait, ...]:
    """Return every wait that the leader knows of: its own, the policy's, and those it was told."""
    ps = leader.ps
    waits = list(ps.waits.snapshot())
    for peer in ps.peers:
        if not peer.gone:
            waits += peer.waits
    if not ps.initialised:
        since_s = time.monotonic() - ps.started_at
        until_s = max(0.0, ps.timing.join_timeout_s - since_s)
        reason = "no chief has initialised the parameters"
        waits.append(Wait("ps 0", "chief 0", reason, since_s, until_s))
    if leader.coordinator is None:
        return tuple(waits)
    for held in leader.coordinator.held():
        pending = ps.pending.get(held.worker)
        by = ", ".join(f"worker {index}" for index in held.by)
        since_s = time.monotonic() - pending.arrived_at if pending is not None else 0.0
        # Those who are there may take their time; their leases end if they are not.
        is_alive = leader.coordinator.is_alive(held.by)
        left_s = None if is_alive else max(0.0, ps.timing.join_timeout_s - since_s)
        on = by or "a worker to join"
        waits.append(Wait(f"worker {held.worker}", on, held.reason, since_s, left_s))
    return tuple(waits)


def _in_order(leader: Leader) -> list[Peer]:
    ranks = {"ps": 0, "chief": 1, "worker": 2}
    return sorted(leader.ps.peers, key=lambda peer: (ranks[peer.role], peer.index))


def _own(leader: Leader) -> TaskStatus:
    ps = leader.ps
    return TaskStatus(
        role=ps.task.role.value,
        index=ps.task.index,
        state="serving" if ps.initialised else "waiting for the chief",
        incarnation=ps.incarnation,
        step=ps.shard.version,
        silent_s=0.0,
        leases=(),
        loss=float("nan"),
        process=ps.process,
        metrics=ps.metrics_address,
        lanes="",
        nbytes=ps.shard.layout.nbytes,
    )


def _task(leader: Leader, peer: Peer) -> TaskStatus:
    leases: tuple[int, ...] = ()
    if peer.is_worker and leader.coordinator is not None:
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
        lanes=peer.lanes or ("" if peer.role == Role.PS else peer.lane),
        nbytes=peer.report.nbytes if peer.report is not None else 0,
    )


def _step(peer: Peer) -> int:
    if peer.is_worker:
        return max(peer.received, 0)
    return peer.report.version if peer.report is not None else peer.saved_step


def _state(leader: Leader, peer: Peer) -> State:
    if peer.gone:
        return "left"
    if peer.silent_s > leader.ps.timing.lease_s:
        return "silent"
    if not peer.is_worker or leader.coordinator is None:
        return "alive"
    member = leader.coordinator.members.get(peer.index)
    if member is None:
        return "joining"
    if member.state == "stopped":
        return "done"
    return "computing" if member.state == "computing" else "waiting"
