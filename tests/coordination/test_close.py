"""Ending a run early: what is being computed counts, and nothing more is begun."""

from __future__ import annotations

from typing import Any

import pytest

from tests.coordination.plays import coordinator, playing
from zmqtrain.coordination.events import Event, GivenUp
from zmqtrain.coordination.state import pack, unpack
from zmqtrain.wire.control import Close

PLAYS: dict[str, tuple[str, dict[str, Any], str]] = {
    "gradients under way are counted before everyone stops": ("hogwild", {"joined": 2}, """
        pull 0     -> answer 0 with 0
        pull 1     -> answer 1 with 1
        close      -> -
        push 0 1 0 -> apply 0
        held       -> 0 waits for 1
        push 1 1 1 -> apply 1, answer 0 stop, answer 1 stop
        held       -> -
        .finished  -> True
        open       -> -
    """),
    "step under way is completed before everyone stops": ("sync-replicas", {"joined": 2}, """
        pull 0     -> -
        pull 1     -> answer 0 with 0, answer 1 with 1
        push 0 1 0 -> -
        close      -> -
        push 1 1 1 -> reduce 0 1, answer 0 stop, answer 1 stop
        .version   -> 1
    """),
    "worker that dies meanwhile is not waited for": ("bounded-staleness:3", {"joined": 2}, """
        pull 0     -> answer 0 with 0
        pull 1     -> answer 1 with 1
        close      -> -
        push 0 1 0 -> apply 0
        leave 1    -> answer 0 stop
        open       -> 1
    """),
    "step that a worker holds up ends without it if time is short":
    ("sync-replicas", {"joined": 2}, """
        pull 0        -> -
        pull 1        -> answer 0 with 0, answer 1 with 1
        close         -> -
        push 0 1 0    -> -
        close at-once -> reduce 0, answer 0 stop
        push 1 1 1    -> drop 1 the job is complete, answer 1 stop
        .version      -> 1
        .steps        -> 1
        open          -> 1
    """),
    # Its worker was told so, and begins no other step.
    "accumulated gradient of a worker that computes on counts at a hurried end":
    ("sync-replicas:aggregate=3", {"joined": 2}, """
        pull 0        -> -
        pull 1        -> answer 0 with 0, answer 1 with 1
        push 0 1 0    -> accumulate 0, answer 0 with 2
        close         -> -
        close at-once -> reduce
        push 0 2 2    -> drop 0 the job is complete, answer 0 stop
        .applied      -> 1
        open          -> 1, 2
    """),
    "run without workers ends at once": ("sync-replicas", {}, """
        close     -> -
        .finished -> True
    """),
    "close of a finished run changes nothing":
    ("hogwild", {"joined": 1, "workers": 1, "steps": 1}, """
        pull 0     -> answer 0 with 0
        push 0 1 0 -> apply 0, answer 0 stop
        close      -> -
        .version   -> 1
        .steps     -> 1
    """),
}  # fmt: skip


@pytest.mark.parametrize(("policy", "fields", "script"), PLAYS.values(), ids=PLAYS)
def test_orders_are_those_of_the_play(policy: str, fields: dict[str, Any], script: str) -> None:
    playing(coordinator(policy, **fields))(script)


@pytest.mark.parametrize(
    "event", [Close(exit_code=143, reason="a signal"), GivenUp(143, "a signal")]
)
def test_end_is_remembered_with_its_first_reason(event: Event) -> None:
    run = unpack(pack(coordinator("hogwild")))
    for each in (event, Close(exit_code=1, reason="another")):
        run.handle(each)
    run = unpack(pack(run))
    assert run.finished
    assert (run.exit_code, run.reason) == (143, "a signal")


def test_complete_job_that_is_ended_has_its_own_end() -> None:
    run = coordinator("hogwild", steps=9, version=9)
    run.handle(Close(exit_code=143, reason="a signal"))
    assert (run.exit_code, run.reason) == (0, "")
