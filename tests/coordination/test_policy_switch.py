"""Changing the policy of a running job, at a version barrier."""

from __future__ import annotations

from typing import Any

import pytest

from tests.coordination.plays import coordinator, playing
from zmqtrain.coordination import waiting
from zmqtrain.coordination.events import Joined, PullArrived, PushArrived
from zmqtrain.policies import Held
from zmqtrain.wire.control import SwitchPolicy

PLAYS: dict[str, tuple[str, dict[str, Any], str]] = {
    "everyone is held until no worker computes": ("hogwild", {"joined": 2}, """
        pull 0               -> answer 0 with 0
        pull 1               -> answer 1 with 1
        switch sync-replicas -> -
        held                 -> -
        push 0 1 0           -> apply 0
        held                 -> 0 waits for 1
        push 1 1 1           -> apply 1, switch sync-replicas, answer 0 with 2, answer 1 with 3
        push 1 2 3           -> -
        held                 -> 1 waits for 0
        push 0 2 2           -> reduce 0 1, answer 0 with 4, answer 1 with 5
        .policy.spec         -> sync-replicas
        .next_policy         -> None
    """),
    "unfinished step is settled under the old policy":
    ("sync-replicas:aggregate=5", {"joined": 2}, """
        pull 0         -> -
        pull 1         -> answer 0 with 0, answer 1 with 1
        push 0 1 0     -> accumulate 0, answer 0 with 2
        switch hogwild -> -
        push 0 2 2     -> accumulate 0
        push 1 1 1     -> accumulate 1, reduce, switch hogwild, answer 0 with 3, answer 1 with 4
        push 1 2 4     -> apply 1, answer 1 with 5
        .version       -> 2
    """),
    "worker that computes and leaves opens the barrier": ("hogwild", {"joined": 2}, """
        pull 0               -> answer 0 with 0
        pull 1               -> answer 1 with 1
        switch sync-replicas -> -
        push 0 1 0           -> apply 0
        leave 1              -> switch sync-replicas, answer 0 with 1
        push 0 2 1           -> reduce 0, answer 0 with 2
    """),
    "policy changes at once when no worker computes": ("sync-replicas", {"joined": 2}, """
        pull 0         -> -
        switch hogwild -> switch hogwild, answer 0 with 0
        pull 1         -> answer 1 with 1
    """),
    "policy changes while no worker is live": ("hogwild", {}, """
        switch sync-replicas -> switch sync-replicas
        join 1 1             -> -
        pull 1               -> answer 1 with 0
    """),
    "worker that joins during a switch begins under the new policy": ("hogwild", {"joined": 2}, """
        pull 0                     -> answer 0 with 0
        switch bounded-staleness:0 -> -
        pull 1                     -> -
        held                       -> 1 waits for 0
        push 0 1 0 -> apply 0, switch bounded-staleness:0, answer 0 with 1, answer 1 with 2
        push 0 2 1                 -> apply 0
        held                       -> 0 waits for 1
    """),
    "last request for a switch wins": ("hogwild", {"joined": 2}, """
        pull 0                     -> answer 0 with 0
        switch sync-replicas       -> -
        switch bounded-staleness:3 -> -
        push 0 1 0                 -> apply 0, switch bounded-staleness:3, answer 0 with 1
    """),
    "run that ends during a switch forgets it":
    ("sync-replicas:aggregate=1", {"joined": 2, "steps": 1}, """
        pull 0         -> -
        pull 1         -> answer 0 with 0, answer 1 with 1
        switch hogwild -> -
        push 0 1 0     -> reduce 0, answer 0 stop
        held           -> -
        push 1 1 1     -> drop 1 the job is complete, answer 1 stop
        .next_policy   -> None
        .policy.spec   -> sync-replicas:aggregate=1
    """),
    "non finite push is held like any other": ("sync-replicas", {"joined": 2}, """
        pull 0         -> -
        pull 1         -> answer 0 with 0, answer 1 with 1
        push 0 1 0     -> -
        switch hogwild -> -
        push 1 1 1 bad -> reduce 0, switch hogwild, answer 0 with 2, answer 1 with 3
        .refused       -> 1
    """),
    "push that is not at every shard keeps the barrier shut":
    ("bounded-staleness:9", {"joined": 2, "shards": 2}, """
        pull 0          -> answer 0 with 0
        push 0 1 0      -> -
        switch hogwild  -> -
        held            -> -
        push 0 1 0 at 1 -> apply 0, switch hogwild, answer 0 with 1
        push 0 2 1      -> apply 0, answer 0 with 2
    """),
    "pull that other shards answered by themselves is not waited for":
    ("hogwild", {"joined": 2, "shards": 2}, """
        pull 0                     -> answer 0 with 0
        switch bounded-staleness:1 -> -
        push 0 1 0                 -> apply 0, switch bounded-staleness:1, answer 0 with 1
        pull 1                     -> answer 1 with 2
    """),
    "leases beyond the last step are not computed under a policy of one push a step":
    ("sync-replicas", {"joined": 2, "steps": 2, "lookahead": 1}, """
        pull 0         -> -
        pull 1         -> answer 0 with 0 2, answer 1 with 1 3
        switch hogwild -> -
        push 0 1 0     -> -
        push 1 1 1     -> reduce 0 1, switch hogwild, answer 0
        held           -> 1 waits for 0
        leave 0        -> answer 1
        push 1 2 3     -> apply 1, answer 1 stop
        open           -> 2
    """),
}  # fmt: skip


@pytest.mark.parametrize(("policy", "fields", "script"), PLAYS.values(), ids=PLAYS)
def test_orders_are_those_of_the_play(policy: str, fields: dict[str, Any], script: str) -> None:
    playing(coordinator(policy, **fields))(script)


def test_held_worker_waits_for_the_policy_to_change() -> None:
    run = coordinator("hogwild")
    for worker in (0, 1):
        run.handle(Joined(worker, 1))
        run.handle(PullArrived(worker))
    run.handle(SwitchPolicy("sync-replicas:aggregate=1"))
    run.handle(PushArrived(1, 1, 1))
    assert list(waiting.held(run)) == [
        Held(1, "the policy changes to sync-replicas:aggregate=1", (0,))
    ]


def test_new_policy_begins_at_the_version_of_the_barrier() -> None:
    run = coordinator("hogwild", joined=2)
    playing(run)("""
        pull 0               -> answer 0 with 0
        push 0 1 0           -> apply 0, answer 0 with 1
        pull 1               -> answer 1 with 2
        push 0 2 1           -> apply 0, answer 0 with 3
        switch sync-replicas -> -
        push 0 3 3           -> apply 0
        push 1 1 2           -> apply 1, switch sync-replicas, answer 0 with 4, answer 1 with 5
        push 0 4 4           -> -
    """)
    assert list(waiting.held(run)) == [Held(0, "step 4 has 1 of 2 gradients", (1,))]


@pytest.mark.parametrize("spec", ["hogwild", "bounded-staleness:0", "sync-replicas"])
def test_policy_can_be_renewed(spec: str) -> None:
    run = coordinator(spec, joined=2)
    playing(run)(f"""
        switch {spec} -> switch {spec}
        pull 0        -> answer 0 with 0
        pull 1        -> {"-" if spec == "sync-replicas" else "answer 1 with 1"}
    """)


@pytest.mark.parametrize(
    "after",
    ["hogwild", "bounded-staleness:4", "sync-replicas", "sync-replicas:aggregate=1,tokens=2"],
)
def test_no_worker_is_behind_when_a_policy_begins(after: str) -> None:
    run = coordinator("hogwild", joined=2)
    playing(run)("pull 0 -> answer 0 with 0\npull 1 -> answer 1 with 1")
    for sequence in range(1, 24):
        run.handle(PushArrived(0, sequence, run.ledger.leases[0][0]))
    assert waiting.behind(run) == {0: 0, 1: 23}
    run.handle(SwitchPolicy(after))
    run.handle(PushArrived(0, 24, run.ledger.leases[0][0]))
    run.handle(PushArrived(1, 1, 1))
    assert run.policy.spec == after
    assert waiting.behind(run) == {0: 0, 1: 0}


def test_worker_that_comes_back_is_not_behind_the_slowest() -> None:
    run = coordinator("hogwild", joined=2)
    playing(run)("pull 0 -> answer 0 with 0\npull 1 -> answer 1 with 1")
    for sequence in range(1, 6):
        run.handle(PushArrived(0, sequence, run.ledger.leases[0][0]))
        if sequence < 3:
            run.handle(PushArrived(1, sequence, run.ledger.leases[1][0]))
    assert waiting.behind(run) == {0: 0, 1: 3}
    run.handle(Joined(1, 2))
    assert waiting.behind(run) == {0: 0}, "it takes no part yet"
    run.handle(PullArrived(1))
    assert waiting.behind(run) == {0: 0, 1: 0}


def test_worker_that_the_bound_holds_is_ahead_by_the_bound() -> None:
    run = coordinator("bounded-staleness:2", joined=2)
    playing(run)("pull 0 -> answer 0 with 0\npull 1 -> answer 1 with 1")
    for sequence in range(1, 4):
        run.handle(PushArrived(0, sequence, run.ledger.leases[0][0]))
    assert [held.worker for held in waiting.held(run)] == [0]
    assert waiting.behind(run) == {0: 0, 1: 2}


def test_worker_with_an_old_token_is_behind_by_steps_of_the_job() -> None:
    """The tokens that a job begins with are of step 0, and one gradient makes a step."""
    run = coordinator("sync-replicas:aggregate=1,tokens=2", joined=2)
    playing(run)("pull 0 -> answer 0 with 0\npull 1 -> answer 1 with 1")
    for sequence in range(1, 5):
        run.handle(PushArrived(0, sequence, run.ledger.leases[0][0]))
    assert waiting.behind(run) == {0: 0, 1: 1}
