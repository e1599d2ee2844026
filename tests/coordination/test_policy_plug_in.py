"""The coordinator with a policy that is none of the built-in ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from tests.coordination.plays import coordinator, playing
from zmqtrain.errors import ConfigError
from zmqtrain.policies import Apply, Decision, Held, Policy, Release, load_policy
from zmqtrain.protocol.orders import Reduce
from zmqtrain.wire.control import SwitchPolicy


class OnTheNextPush(Policy):
    """Lets a worker in when another pushes, so that it never begins between two updates."""

    spec = f"{__name__}:OnTheNextPush"

    def start(self, version: int, workers: int) -> None:
        self.computing: set[int] = set()
        self.waiting: list[int] = []

    def join(self, worker: int) -> list[Decision]:
        self.waiting.append(worker)
        return [] if self.computing else self._let_in()

    def leave(self, worker: int) -> list[Decision]:
        self.computing.discard(worker)
        if worker in self.waiting:
            self.waiting.remove(worker)
        return [] if self.computing else self._let_in()

    def push(self, worker: int) -> list[Decision]:
        self.waiting.append(worker)
        return [Apply(worker), *self._let_in()]

    def held(self) -> Iterable[Held]:
        return [Held(w, "waits for a push", tuple(self.computing)) for w in self.waiting]

    def _let_in(self) -> list[Decision]:
        released = sorted(self.waiting)
        self.waiting.clear()
        self.computing.update(released)
        return [Release(worker) for worker in released]


def test_worker_without_a_batch_may_be_held_by_the_next_policy() -> None:
    run = coordinator("hogwild", joined=3, workers=3, steps=3, lookahead=1)
    playing(run)("""
        pull 0     -> answer 0 with 0 1
        pull 1     -> answer 1 with 2
        pull 2     -> -
    """)
    run.handle(SwitchPolicy(load_policy(OnTheNextPush.spec).spec))
    playing(run)(f"""
        push 0 1 0 -> apply 0
        push 1 1 2 -> apply 1, switch {OnTheNextPush.spec}, answer 0
        held       -> 1 waits for 0, 2 waits for 0
        push 0 2 1 -> apply 0, answer 0 stop, answer 1 stop, answer 2 stop
    """)


class Longer(Policy):
    """Rounds of one worker, each of which is a step longer than the one before, up to three."""

    step_per_push = False
    most_local_steps = 3

    def local_steps(self, step: int) -> int:
        return 1 + step

    def push(self, worker: int) -> list[Decision]:
        return [Reduce((worker,)), Release(worker)]


class Alone(Policy):
    """Counts each result of two steps when it arrives."""

    most_local_steps = 2
    at_arrival = True

    def push(self, worker: int) -> list[Decision]:
        return [Apply(worker), Release(worker)]


PLAYS: dict[str, tuple[Policy, dict[str, Any], str]] = {
    "worker that is fed again may be held by the policy":
    (OnTheNextPush(), {"joined": 3, "workers": 3, "steps": 3, "lookahead": 1}, """
        pull 0     -> answer 0 with 0 1
        pull 2     -> -
        push 0 1 0 -> apply 0, answer 0, answer 2 with 2
        pull 1     -> -
        held       -> 1 waits for 0 2
        push 0 2 1 -> apply 0
        held       -> 0 waits for 2, 1 waits for 2
        leave 2    -> answer 0 with 2
        held       -> 1 waits for 0
        push 0 3 2 -> apply 0, answer 0 stop, answer 1 stop
    """),
    "policy of ones own may have rounds":
    (Longer(), {"joined": 1, "workers": 1, "steps": 7}, """
        pull 0          -> answer 0 with 0 alone
        push 0 1 0      -> reduce 0 of 1 steps, answer 0 with 1 2 alone
        push 0 2 1 of 2 -> reduce 0 of 2 steps, answer 0 with 3 4 5 alone
        push 0 3 3 of 3 -> reduce 0 of 3 steps, answer 0 with 6 alone
        push 0 4 6      -> reduce 0 of 1 steps, answer 0 stop
        .version        -> 7
    """),
    "policy of ones own may count results at arrival":
    (Alone(), {"joined": 1, "workers": 1, "steps": 4}, """
        pull 0          -> answer 0 with 0 1 alone
        push 0 1 0 of 2 -> apply 0 of 2 among 1, answer 0 with 2 3 alone
        push 0 2 2 of 2 -> apply 0 of 2 among 1, answer 0 stop
    """),
}  # fmt: skip


@pytest.mark.parametrize(("policy", "fields", "script"), PLAYS.values(), ids=PLAYS)
def test_orders_are_those_of_the_play(policy: Policy, fields: dict[str, Any], script: str) -> None:
    playing(coordinator(policy, **fields))(script)


class AppliesRounds(Policy):
    """Applies results of local steps as if they were gradients."""

    spec = f"{__name__}:AppliesRounds"
    most_local_steps = 2

    def push(self, worker: int) -> list[Decision]:
        return [Apply(worker), Release(worker)]


def test_result_of_a_round_that_a_policy_applies_as_a_gradient_is_refused() -> None:
    play = playing(coordinator(AppliesRounds(), joined=1, workers=1))
    play("pull 0 -> answer 0 with 0 1 alone")
    with pytest.raises(ConfigError, match=r"AppliesRounds applies .* or at_arrival"):
        play("push 0 1 0 -> -")
