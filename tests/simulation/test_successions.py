"""Hosts that are lost for good, where parts have copies: the others go on without a step lost."""

from __future__ import annotations

import re
from typing import Any

import pytest

from simulation.faults import Fault
from simulation.rules import before, delay, drop, duplicate
from simulation.schedule import Schedule
from tests.simulation.test_measuring import dying
from tests.traces import Trace, calm, trace_of
from zmqtrain.wire.control import HandedOver, HandOver
from zmqtrain.wire.messages import Orders

LEASE_S = calm().timing.lease_s
NEVER_S = 1000.0  # between two checkpoints: what is not handed on is lost


def lost(*workers: int, at: float = 1.6, **fields: Any) -> Schedule:
    faults = tuple(Fault(at, "lose", (f"worker {index}",)) for index in workers)
    given = {"ps": 0, "hosts": True, "keeps": True, "save_secs": NEVER_S, "copies": 2, "steps": 24}
    return calm(**given | {"faults": faults} | fields)


def goes_on_at(trace: Trace) -> int:
    """Return the step at which the next group goes on, of which nothing before is lost."""
    (line,) = trace.of("the job goes on at step .*, without a step lost")
    begun, *_ = trace.of("generation 2 begins at version")
    (step,) = re.findall(r"at step (\d+),", line)
    assert f"generation 2 begins at version {step}," in begun
    return int(step)


def seconds(trace: Trace, pattern: str) -> float:
    """Return when the last line with this pattern was said."""
    return float(trace.of(pattern)[-1].split()[0])


@pytest.mark.parametrize(
    ("policy", "worker"), [("sync-replicas", 0), ("bounded-staleness:1", 1), ("hogwild:whole", 2)]
)
def test_group_without_one_host_goes_on_where_it_was(policy: str, worker: int) -> None:
    assert goes_on_at(trace_of(lost(worker, policy=policy))) > 2


@pytest.mark.parametrize("worker", [0, 2])
def test_copies_that_muon_trains_are_equal_and_go_on_where_they_were(worker: int) -> None:
    assert goes_on_at(trace_of(lost(worker, policy="sync-replicas", matrices=True))) > 2


def test_long_silent_worker_is_not_waited_for() -> None:
    trace = trace_of(lost(2, policy="sync-replicas"))
    assert seconds(trace, "goes on at") - seconds(trace, "looking for") < LEASE_S


@pytest.mark.parametrize("small", [False, True])
def test_hosts_up_to_the_number_of_further_copies_may_be_lost_at_once(small: bool) -> None:
    assert goes_on_at(trace_of(lost(0, 3, workers=5, copies=3, small=small))) > 2


def test_part_that_is_lost_with_its_copy_goes_back_to_the_last_checkpoint() -> None:
    trace = trace_of(lost(2, 3, workers=5, save_secs=0.2))
    (line,) = trace.of("the job goes on from the last checkpoint")
    assert "worker 2, worker 3" in line
    assert trace.of("generation 2 begins at version .*, from .*step-")


def test_orders_that_only_one_other_ps_had_are_carried_out_by_all() -> None:
    """Worker 0 is lost with the leader, before the last orders come to worker 2."""
    rules = (drop(Orders, receiver="worker 2", from_s=1.3, until_s=1.7),)
    trace = trace_of(lost(0, rules=rules))
    assert goes_on_at(trace) > 2


@pytest.mark.parametrize(("point", "worker", "step"), [("report", 0, 2), ("update", 1, 1)])
def test_update_that_is_held_back_when_a_host_is_lost_is_not_half_made(
    point: str, worker: int, step: int
) -> None:
    rules = (dying(f"worker {worker}", point, "lose"),)
    assert goes_on_at(trace_of(lost(clips=True, rules=rules))) == step


def test_messages_of_the_hand_over_may_be_lost_or_come_late_or_twice() -> None:
    rules = (
        drop(HandOver, 1),
        drop(HandedOver, 1),
        duplicate(HandOver, 2),
        delay(HandedOver, 2, by_s=1.0),
    )
    assert goes_on_at(trace_of(lost(2, workers=4, rules=rules))) > 2


@pytest.mark.parametrize("who", ["worker 0", "worker 1"])
def test_worker_that_is_killed_in_the_hand_over_still_has_its_part(who: str) -> None:
    rule = before(HandOver, 1, fault=Fault(0.0, "kill", (who,), 0.1))
    assert goes_on_at(trace_of(lost(2, rules=(rule,)))) > 2
