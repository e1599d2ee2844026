"""Evaluations: of exactly the steps that were asked for, on the way or shared by held workers.

That each is of the step that it names, on all shards, is checked at the end of every run.
"""

from __future__ import annotations

import re
from itertools import cycle
from typing import Any

import pytest

from simulation.faults import Fault
from simulation.rules import Rule, before, delay, drop, duplicate
from simulation.run import simulate
from tests.traces import ON_A_BOARD, Trace, calm, held, trace_of
from zmqtrain.protocol.status import Status
from zmqtrain.wire.control import Evaluate, Evaluated, Keep
from zmqtrain.wire.messages import Lookup, RowValues

STEPS = {"steps": 40, "evaluates": 10}
PLACES: dict[str, dict[str, Any]] = {
    "one ps": {"ps": 1},
    "three ps": {"ps": 3},
    "shm": {"ps": 2, "lane": "shm"},
    "no ps": {"ps": 0, "lane": "memory"},
    "a board": ON_A_BOARD,
}
TASKS = "chief 0", "worker 0", "worker 1", "ps 0"
KILL = {name: Fault(0.0, "kill", (name,), 0.05) for name in TASKS}
POLICIES = (
    "sync-replicas",
    "sync-replicas:aggregate=2",
    "bounded-staleness:2",
    "hogwild:whole",
    "hogwild",
)


def evaluated(trace: Trace) -> list[int]:
    """Return the steps that were evaluated before the end."""
    lines = trace.of("chief 0 says: step [0-9]+: loss")
    return [int(found[1]) for line in lines if (found := re.search("step ([0-9]+):", line))]


@pytest.mark.parametrize("tables", [False, True], ids=["", "tables"])
@pytest.mark.parametrize(
    ("place", "policy"), list(zip(PLACES.values(), POLICIES, strict=True)), ids=PLACES
)
def test_every_policy_is_evaluated_at_exactly_these_steps(
    place: dict[str, Any], policy: str, tables: bool
) -> None:
    trace = trace_of(calm(**place, **STEPS, policy=policy, tables=tables))
    assert evaluated(trace) == [10, 20, 30]


SENDER, RECEIVER = {"sender": "chief 0"}, {"receiver": "chief 0"}
OF_ROWS: dict[str, tuple[Rule, dict[str, Any]]] = {
    "the chief is killed": (before(Lookup, 2, **SENDER, fault=KILL["chief 0"]), {"ps": 2}),
    "a ps is killed": (before(RowValues, 2, **RECEIVER, fault=KILL["ps 0"]), {"ps": 2}),
    "the host of the ps is killed": (
        before(RowValues, 2, **RECEIVER, fault=KILL["worker 0"]),
        ON_A_BOARD,
    ),
    "answers are lost": (drop(RowValues, 1, 3, **RECEIVER), PLACES["shm"]),
    "questions come late": (delay(Lookup, 1, 3, by_s=1.0, **SENDER), ON_A_BOARD),
    "versions are asked for twice": (duplicate(Keep), PLACES["no ps"]),
}


@pytest.mark.parametrize(("rule", "place"), OF_ROWS.values(), ids=OF_ROWS)
def test_rows_are_those_of_the_step_or_not_evaluated_under_faults(
    rule: Rule, place: dict[str, Any]
) -> None:
    held(calm(**place, **STEPS, tables=True, rules=(rule,)))


@pytest.mark.parametrize("place", [{"ps": 1}, ON_A_BOARD], ids=["ps", "board"])
def test_next_chief_asks_anew_and_the_steps_up_to_then_are_not_evaluated(
    place: dict[str, Any],
) -> None:
    kill = Fault(0.0, "kill", ("chief 0",), 0.05)
    rule = before(Keep, 2, sender="chief 0", fault=kill)  # when it looks whether the ps is so far
    trace = trace_of(calm(**place, **STEPS, rules=(rule,)))
    assert trace.of("taking over in generation 1")
    steps = evaluated(trace)
    assert steps == [step for step in (20, 30) if step >= steps[0]]


def test_step_that_was_kept_is_evaluated_though_the_job_has_ended_meanwhile() -> None:
    unheard = drop(Status, receiver="chief 0", from_s=0.1, until_s=2.0)
    trace = trace_of(calm(ps=2, steps=12, evaluates=10, rules=(unheard,)))
    assert evaluated(trace) == [10]


def test_step_is_evaluated_before_the_end_of_an_epoch_that_came_meanwhile() -> None:
    """Else that end would count as a step to which the job has not come any more."""
    unheard = drop(Status, receiver="chief 0", from_s=0.1, until_s=2.0)
    lines: list[str] = []
    epochs = {"steps": 30, "epochs": 2, "evaluates": 2}  # of 5 steps each
    report = simulate(calm(**epochs, rules=(unheard,)), lines.append)
    assert not report.broken, str(report)
    moments = ("step 2: loss", r"-> sent: .*Extend\(limit=30\b", "step 6: loss")
    found = [next(i for i, line in enumerate(lines) if re.search(it, line)) for it in moments]
    assert found == sorted(found)


EPOCHS = {"steps": 24, "epochs": 3, "slow_chief": True}
SHARED: dict[str, Rule] = {
    "a worker is killed when it is asked": before(
        Evaluate, 1, receiver="worker 1", fault=KILL["worker 1"]
    ),
    "the chief is killed when it is answered": before(
        Evaluated, 2, receiver="chief 0", fault=KILL["chief 0"]
    ),
    "questions are lost": drop(Evaluate, receiver="worker"),
    "answers are lost": drop(Evaluated, sender="worker"),
    "answers come twice": duplicate(Evaluated),
    "questions come late": delay(Evaluate, 1, 3, by_s=1.0, sender="chief"),
    "answers come late": delay(Evaluated, 1, by_s=1.0, sender="worker"),
}


@pytest.mark.parametrize(
    ("rule", "place"),
    list(zip(SHARED.values(), cycle([{"ps": 2}, {"ps": 0, "lane": "shm"}, ON_A_BOARD]))),
    ids=SHARED,
)
def test_shared_evaluation_is_right_and_ends_under_faults(
    rule: Rule, place: dict[str, Any]
) -> None:
    held(calm(**place, **EPOCHS, rules=(rule,)))
