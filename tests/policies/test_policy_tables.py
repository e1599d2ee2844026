"""Answers of each policy, event by event."""

from __future__ import annotations

import pytest

from tests.policies.plays import playing
from zmqtrain.policies import Held, make_policy

PLAYS: dict[str, tuple[str, str]] = {
    "results count alone once the warm up is over": ("local-steps:2,after=1,async,bound=1", """
        start 0 2 -> -
        join 0    -> -
        join 1    -> release 0, release 1
        push 1    -> -
        held      -> 1 waits for 0
        push 0    -> reduce 0 1, release 0, release 1
        push 1    -> apply 1, release 1
        push 1    -> apply 1
        held      -> 1 waits for 0
        join 2    -> release 2
        leave 2   -> -
        push 0    -> apply 0, release 0, release 1
        drain     -> -
    """),
    "worker that leaves may end the warm up": ("local-steps:2,after=1,async,bound=0", """
        start 0 2 -> -
        join 0    -> -
        join 1    -> release 0, release 1
        push 1    -> -
        leave 0   -> reduce 1, release 1
        push 1    -> apply 1, release 1
        join 0    -> release 0
        push 1    -> apply 1
        held      -> 1 waits for 0
    """),
    "tokens are taken in the order of the pushes": ("sync-replicas:aggregate=2,tokens=1", """
        start 4 3 -> -
        join 0    -> release 0
        join 1    -> release 1
        join 2    -> release 2
        push 2    -> accumulate 2, release 2
        push 1    -> reduce 1, release 1
        push 2    -> drop 2 stale, release 2
        push 0    -> drop 0 stale, release 0
        push 2    -> -
        held      -> 2 waits for 0 1
        push 0    -> reduce 0 2, release 2, release 0
    """),
    "token of a worker that left is taken by another": ("sync-replicas:aggregate=2,tokens=0", """
        start 0 2 -> -
        join 0    -> release 0
        join 1    -> release 1
        push 1    -> -
        leave 1   -> -
        push 0    -> reduce 0 1, release 0
        push 0    -> accumulate 0, release 0
        push 0    -> reduce 0, release 0
    """),
    "counted gradient of a worker that rejoins keeps its token step":
    ("sync-replicas:aggregate=2,tokens=0", """
        start 0 2 -> -
        join 0    -> release 0
        push 0    -> -
        leave 0   -> -
        join 0    -> accumulate 0, release 0
        push 0    -> reduce 0, release 0
    """),
}  # fmt: skip


@pytest.mark.parametrize(("spec", "script"), PLAYS.values(), ids=PLAYS)
def test_events_are_answered_as_in_the_play(spec: str, script: str) -> None:
    playing(spec)(script)


def test_bounded_staleness_names_the_steps_that_a_worker_is_ahead() -> None:
    policy = make_policy("bounded-staleness:1")
    policy.start(0, 3)
    for worker in (0, 1, 2):
        policy.join(worker)
    policy.push(0)
    policy.push(0)
    policy.push(1)
    assert list(policy.held()) == [Held(0, "is 2 steps ahead, the bound is 1", (2,))]


def test_sync_replicas_say_how_far_the_step_is() -> None:
    policy = make_policy("sync-replicas")
    policy.start(7, 3)
    policy.join(2)
    assert list(policy.held()) == [Held(2, "1 of 3 workers have joined", (0, 1))]
    policy.join(0)
    policy.join(1)
    policy.push(1)
    assert list(policy.held()) == [Held(1, "step 7 has 1 of 3 gradients", (0, 2))]


def test_token_sync_replicas_say_how_far_the_step_is() -> None:
    policy = make_policy("sync-replicas:aggregate=2,tokens=0")
    policy.start(7, 2)
    policy.join(0)
    policy.join(1)
    policy.push(1)
    assert list(policy.held()) == [Held(1, "waits for a token; step 7 has 1 of 2", (0,))]


@pytest.mark.parametrize(
    ("spec", "coordinated", "step_per_push", "staleness_bound"),
    [
        ("hogwild", False, True, None),
        ("hogwild:whole", True, True, None),
        ("bounded-staleness:0", True, True, 0),
        ("bounded-staleness:4", True, True, 4),
        ("sync-replicas", True, False, 0),
        ("sync-replicas:aggregate=3", True, False, 0),
        ("sync-replicas:aggregate=3,tokens=2", True, False, None),
        ("local-steps:5,after=2", True, False, 0),
        ("local-steps:5,async", True, False, 20),
        ("local-steps:5,after=2,async,bound=3", True, False, 15),
    ],
)
def test_policy_has_the_properties_of_its_kind(
    spec: str, coordinated: bool, step_per_push: bool, staleness_bound: int | None
) -> None:
    policy = make_policy(spec)
    assert policy.spec == spec
    assert policy.coordinated is coordinated
    assert policy.step_per_push is step_per_push
    assert policy.staleness_bound == staleness_bound
