"""Local steps without rounds: each result counts when it arrives, with as many steps as batches."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heapreplace
from typing import Any

import pytest

from tests.coordination.plays import coordinator, playing
from zmqtrain.coordination.coordinator import Coordinator
from zmqtrain.coordination.events import PullArrived, PushArrived
from zmqtrain.coordination.ledger import Ledger
from zmqtrain.optim.outer import CLOSES, OPENS
from zmqtrain.protocol.orders import Answer, Apply

PLAYS: dict[str, tuple[str, dict[str, Any], str]] = {
    "each result is applied with all of its batches as steps":
    ("local-steps:2,async", {"joined": 2, "steps": 8}, """
        pull 0          -> answer 0 with 0 1 alone
        pull 1          -> answer 1 with 2 3 alone
        push 1 1 2 of 2 -> apply 1 of 2 among 2 opens, answer 1 with 4 5 alone
        push 0 1 0 of 2 -> apply 0 of 2 among 2 closes, answer 0 with 6 7 alone
        push 0 2 6 of 2 -> apply 0 of 2 among 2 opens
        held            -> 0 waits for 1
        push 1 2 4 of 2 -> apply 1 of 2 among 2 closes, answer 0 stop, answer 1 stop
        .version          -> 8
        .applied          -> 4
        .ledger.uncounted -> 8
    """),
    # Worker 2 does not compute yet.
    "batches of a worker that dies are leased again": ("local-steps:2,async", {"joined": 3}, """
        pull 0          -> answer 0 with 0 1 alone
        pull 1          -> answer 1 with 2 3 alone
        leave 0         -> -
        push 1 1 2 of 2 -> apply 1 of 2 among 1, answer 1 with 0 1 alone
    """),
    "no result goes over an evaluation or the last step":
    ("local-steps:4,async", {"joined": 2, "evaluate_every": 6, "steps": 7}, """
        pull 0          -> answer 0 with 0 1 2 3 alone
        pull 1          -> answer 1 with 4 5 alone
        push 1 1 4 of 2 -> apply 1 of 2 among 2 opens
        push 0 1 0 of 4 -> apply 0 of 4 among 2 closes, answer 0 with 6 alone
        push 0 2 6 of 1 -> apply 0 of 1 among 2 opens, answer 0 stop, answer 1 stop
    """),
    "worker too many rounds ahead waits": ("local-steps:2,async,bound=1", {"joined": 2}, """
        pull 0          -> answer 0 with 0 1 alone
        pull 1          -> answer 1 with 2 3 alone
        push 0 1 0 of 2 -> apply 0 of 2 among 2 opens, answer 0 with 4 5 alone
        push 0 2 4 of 2 -> apply 0 of 2 among 2 closes
        held            -> 0 waits for 1
        leave 1         -> answer 0 with 2 3 alone
    """),
    "refused batch is replaced within the round":
    ("local-steps:3,async", {"workers": 1, "joined": 1, "steps": 4}, """
        pull 0          -> answer 0 with 0 1 2 alone
        push 0 1 1 bad  -> answer 0 with 3 alone
        push 0 2 0 of 3 -> apply 0 of 3 among 1, answer 0 with 4 alone
    """),
    "pass ends when all of its batches are counted":
    ("local-steps:4,async", {"joined": 2, "ledger": Ledger(limit=5)}, """
        pull 0          -> answer 0 with 0 1 2 3 alone
        pull 1          -> answer 1 with 4 alone
        push 1 1 4 of 1 -> apply 1 of 1 among 2 opens
        push 0 1 0 of 4 -> apply 0 of 4 among 2 closes
        .is_pass_over   -> True
    """),
    "switches begin and end arrivals when no worker computes":
    ("sync-replicas", {"workers": 1, "joined": 1}, """
        pull 0                     -> answer 0 with 0
        switch local-steps:2,async -> -
        push 0 1 0                 -> reduce 0, switch local-steps:2,async, answer 0 with 1 2 alone
        push 0 2 1 of 2            -> apply 0 of 2 among 1, answer 0 with 3 4 alone
        switch local-steps:2       -> -
        push 0 3 3 of 2 -> apply 0 of 2 among 1, switch local-steps:2, answer 0 with 5 6 alone
        push 0 4 5 of 2            -> reduce 0 of 2 steps, answer 0 with 7 8 alone
    """),
}  # fmt: skip


@pytest.mark.parametrize(("policy", "fields", "script"), PLAYS.values(), ids=PLAYS)
def test_orders_are_those_of_the_play(policy: str, fields: dict[str, Any], script: str) -> None:
    playing(coordinator(policy, **fields))(script)


def test_answers_ask_for_differences_once_the_warm_up_is_over() -> None:
    run = coordinator("local-steps:2,after=1,async", workers=1, joined=1)
    (first,) = run.handle(PullArrived(0))
    assert isinstance(first, Answer)
    assert (first.local_steps, first.sends_difference) == (0, False)
    *_, then = run.handle(PushArrived(0, 1, 0))
    assert isinstance(then, Answer)
    assert (then.local_steps, then.sends_difference) == (2, True)


def played(run: Coordinator, seconds: list[float], results: int) -> Iterator[Apply]:
    """Have workers make local steps that take these seconds each; yield how they count."""
    due: list[tuple[float, int, int, int]] = []
    for worker in range(len(seconds)):
        (answer,) = run.handle(PullArrived(worker))
        assert isinstance(answer, Answer)
        due.append((seconds[worker] * answer.local_steps, worker, answer.local_steps, 1))
    heapify(due)
    for _ in range(results):
        now, worker, batches, sequence = due[0]
        first = run.ledger.leases[worker][0]
        orders = run.handle(PushArrived(worker, sequence, first, batches, batches=batches))
        (applied,) = (order for order in orders if isinstance(order, Apply))
        yield applied
        (answer,) = (order for order in orders if isinstance(order, Answer))
        steps = answer.local_steps
        heapreplace(due, (now + seconds[worker] * steps, worker, steps, sequence + 1))


@pytest.mark.parametrize("seconds", [[1.0, 1.0], [1.0, 4.0], [3.0, 1.0, 1.5], [1.0] * 6])
def test_workers_get_batches_in_proportion_to_their_speed(seconds: list[float]) -> None:
    run = coordinator(
        "local-steps:40,async,bound=9", workers=len(seconds), joined=len(seconds), steps=100_000
    )
    found: dict[int, int] = {}
    for applied in played(run, seconds, 60):
        found[applied.worker] = applied.local_steps
    fastest = min(seconds)
    for worker, each in enumerate(seconds):
        assert found[worker] == pytest.approx(40 * fastest / each, rel=0.15)


def test_cycle_of_momentum_has_a_result_for_each_worker() -> None:
    run = coordinator("local-steps:3,async", workers=3, joined=3, steps=10_000)
    cycles = [applied.cycle for applied in played(run, [1.0, 1.1, 1.2], 9)]
    assert cycles == [OPENS, 0, CLOSES] * 3
