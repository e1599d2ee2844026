"""Waits of the workers of a job, and the distances between them. Pure; no decision needs them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from zmqtrain.coordination.coordinator import Coordinator
from zmqtrain.policies import Held
from zmqtrain.policies.base import Clocked


def held(coordinator: Coordinator) -> Iterator[Held]:
    """Yield the workers that wait for other workers.

    There are none once the job is complete, or between two passes, when all wait for the chief.
    """
    if coordinator.finished or coordinator.is_pass_over:
        return
    by = tuple(sorted(coordinator.workers_by_state["computing"]))
    following = coordinator.next_policy
    if coordinator.closing or following is not None:
        change = f"the policy changes to {following.spec if following is not None else ''}"
        reason = "the run is ending" if coordinator.closing else change
        for worker in coordinator.workers_in("waiting", "starved", "spare"):
            yield Held(worker, reason, by)
        return
    yield from coordinator.policy.held()
    for worker in coordinator.workers_in("starved", "spare"):
        until = "step up to the last" if coordinator.ledger.may_lease else "batch of the pass"
        yield Held(worker, f"every {until} is being computed already", by)


def behind(coordinator: Coordinator) -> dict[int, int]:
    """Return each active worker's steps behind the first one; {} if the policy counts none."""
    policy = coordinator.policy
    steps = policy.steps if isinstance(policy, Clocked) else {}
    first = max(steps.values(), default=0)
    return {worker: first - step for worker, step in steps.items()}


def lacking(coordinator: Coordinator, workers: Iterable[int]) -> dict[int, set[int]]:
    """Return, for workers whose push is at some shards, the shards that lack it."""
    known = coordinator.members
    found = {worker: known[worker] for worker in workers if worker in known}
    return {
        worker: {n for n in range(coordinator.shards) if not member.parts >> n & 1}
        for worker, member in found.items()
        if member.arriving > member.sequence
    }


def is_alive(coordinator: Coordinator, workers: Iterable[int]) -> bool:
    """Return whether any of them is alive; a policy may wait for workers that never joined."""
    return any(worker in coordinator.members for worker in workers)
