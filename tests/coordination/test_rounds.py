"""Rounds of local steps: many batches are leased at once, and count with one push or not at all."""

from __future__ import annotations

from typing import Any

import pytest

from tests.coordination.plays import coordinator, playing
from zmqtrain.coordination.events import PushArrived
from zmqtrain.coordination.ledger import Ledger
from zmqtrain.protocol.orders import Answer

PLAYS: dict[str, tuple[str, dict[str, Any], str]] = {
    "round counts all batches of each worker with its push":
    ("local-steps:2", {"joined": 2, "steps": 5}, """
        pull 0            -> -
        pull 1            -> answer 0 with 0 2 alone, answer 1 with 1 3 alone
        push 1 1 1 of 2   -> -
        held              -> 1 waits for 0
        push 0 1 0 of 2   -> reduce 0 1 of 2 steps, answer 0 with 4 6 alone, answer 1 with 5 7 alone
        push 0 2 4 of 2   -> -
        push 1 2 5 of 2   -> reduce 0 1 of 2 steps, answer 0 with 8 alone, answer 1 with 9 alone
        push 0 3 8        -> -
        push 1 3 9        -> reduce 0 1 of 1 steps, answer 0 stop, answer 1 stop
        .version          -> 5
        .applied          -> 6
        .ledger.uncounted -> 10
    """),
    "batches of a worker that dies are leased again": ("local-steps:2", {"joined": 2}, """
        pull 0          -> -
        pull 1          -> answer 0 with 0 2 alone, answer 1 with 1 3 alone
        push 0 1 0 of 2 -> -
        leave 1         -> reduce 0 of 2 steps, answer 0 with 1 3 alone
    """),
    "last round of a pass is shorter":
    ("local-steps:4", {"joined": 2, "ledger": Ledger(limit=5)}, """
        pull 0          -> -
        pull 1          -> answer 0 with 0 2 4 alone, answer 1 with 1 3 alone
        push 0 1 0 of 3 -> -
        push 1 1 1 of 2 -> reduce 0 1 of 3 steps
        extend 9        -> switch local-steps:4, answer 0 with 5 7 alone, answer 1 with 6 8 alone
    """),
    "round ends at an evaluation":
    ("local-steps:4", {"workers": 1, "joined": 1, "evaluate_every": 6}, """
        pull 0          -> answer 0 with 0 1 2 3 alone
        push 0 1 0 of 4 -> reduce 0 of 4 steps, answer 0 with 4 5 alone
        push 0 2 4 of 2 -> reduce 0 of 2 steps, answer 0 with 6 7 8 9 alone
    """),
    "refused batch is replaced and the rest of the round stays leased":
    ("local-steps:3", {"workers": 1, "joined": 1}, """
        pull 0              -> answer 0 with 0 1 2 alone
        push 0 1 1 bad      -> answer 0 with 3 alone
        push 0 2 0 of 3     -> reduce 0 of 3 steps, answer 0 with 4 5 6 alone
        push 0 3 4 of 3 bad -> answer 0 with 7 8 9 alone
        .refused            -> 2
        .version            -> 3
        .ledger.uncounted   -> 7
    """),
    "rounds begin after steps of gradients":
    ("local-steps:2,after=1", {"workers": 1, "joined": 1, "lookahead": 1}, """
        pull 0          -> answer 0 with 0 1
        push 0 1 0      -> reduce 0, answer 0 with 2 alone
        push 0 2 1 of 2 -> reduce 0 of 2 steps, answer 0 with 3 4 alone
    """),
    "switch begins and ends rounds when no worker computes":
    ("sync-replicas", {"workers": 1, "joined": 1}, """
        pull 0               -> answer 0 with 0
        switch local-steps:2 -> -
        push 0 1 0           -> reduce 0, switch local-steps:2, answer 0 with 1 2 alone
        switch sync-replicas -> -
        push 0 2 1 of 2      -> reduce 0 of 2 steps, switch sync-replicas, answer 0 with 3
        push 0 3 3           -> reduce 0, answer 0 with 4
    """),
}  # fmt: skip


@pytest.mark.parametrize(("policy", "fields", "script"), PLAYS.values(), ids=PLAYS)
def test_orders_are_those_of_the_play(policy: str, fields: dict[str, Any], script: str) -> None:
    playing(coordinator(policy, **fields))(script)


def test_round_is_no_longer_than_the_job_whatever_was_leased_before() -> None:
    run = coordinator("sync-replicas", workers=1, joined=1, lookahead=3, steps=2)
    playing(run)("""
        pull 0               -> answer 0 with 0 1 2 3
        switch local-steps:2 -> -
    """)
    *_, answer = run.handle(PushArrived(0, 1, 0))
    assert answer == Answer(0, 1, 1, (), local_steps=1)
