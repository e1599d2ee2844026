"""Tasks that begin, come back or end while others do: what each must know of the lives before."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from simulation.faults import Fault
from simulation.rules import before, delay, drop, refuse
from simulation.run import simulate
from tests.traces import Trace, calm, held, trace_of
from zmqtrain.config.timing import Timing
from zmqtrain.wire.control import Initialize, Save
from zmqtrain.wire.messages import Pull, Push, Read

USUAL = calm(
    steps=40,
    lane="memory",
    save_secs=1000.0,
    timing=Timing(heartbeat_s=0.1, lease_s=0.4, join_timeout_s=20, peer_timeout_s=12, grace_s=4),
)


def run(*faults: Fault, **fields: Any) -> Trace:
    return trace_of(replace(USUAL, faults=faults, **fields))


@pytest.mark.parametrize("lane", ["shm", "memory"], ids=["its memory", "a checkpoint"])
def test_ps_numbers_a_new_life_above_the_last_one_known_from(lane: str) -> None:
    """The worker died as the youngest of all. Another shard knows it and lets no older life in."""
    faults = [
        Fault(0.1, "kill", ("worker 1",), 0.7),
        Fault(1.2, "kill", ("worker 1",), 1.4),
        Fault(1.9, "kill", ("ps 0",), 0.2),
    ]
    if lane == "memory":
        faults.append(Fault(1.0, "save"))
    set_back = (1.1, -3600.0)
    trace = run(*faults, lane=lane, keeps=lane == "memory", slow=0, clock_set=set_back)
    assert len(trace.of("ps 1 says: worker 1 joined")) == 3
    assert not trace.of("has a newer life already")


def test_chief_begins_again_when_its_first_begin_comes_to_nothing() -> None:
    """As when a ps has a new life that the chief has not joined."""
    trace = run(ps=1, steps=4, rules=(refuse(Initialize, 1),))
    assert trace.of("chief 0 says: .*ps.* has restarted; the chief is joining again")
    assert trace.of("chief 0 ended: exit code 0")


def test_new_chief_does_not_restart_a_job_that_a_shard_has_begun() -> None:
    trace = run(Fault(0.5, "kill", ("ps 1",), 0.1), Fault(0.5, "kill", ("chief 0",), 0.3))
    assert trace.of("ps 1 restarted without parameters, and there is no checkpoint to restore")
    assert not trace.of("generation 2 begins")


@pytest.mark.parametrize("faults", [(), (Fault(0.5, "kill", ("chief 0",), 0.3),)])
def test_ps_lost_before_the_first_checkpoint_has_the_job_begin_once_more(
    faults: tuple[Fault, ...],
) -> None:
    kill = Fault(0.5, "kill", ("ps 1",), 0.1)
    trace = run(kill, *faults, lane="memory", keeps=True, save_secs=1000.0)
    assert trace.of("ps 1 restarted without parameters: restoring the beginning")
    assert trace.of("generation 2 begins at version 0")
    assert trace.of("chief 0 ended: exit code 0")


def test_ps_does_not_end_before_a_worker_that_was_stopped_when_the_job_ended() -> None:
    """It was silent for longer than a goodbye takes, and for less than three heartbeats."""
    timing = Timing(heartbeat_s=1.5, lease_s=6.0)
    stops = Fault(1.0, "stop", ("chief 0",), 9.0), Fault(9.9, "stop", ("worker 1",), 3.0)
    trace = run(*stops, ps=1, timing=timing)
    assert trace.of("worker 1 ended: exit code 0")


@pytest.mark.parametrize("lines", [25, 40, 60, 88, 120])
def test_pull_that_was_released_before_it_came_is_answered_though_the_ps_dies_over_it(
    lines: int,
) -> None:
    """Its mark says that it has come and may go on, and not that it was answered."""
    pulls = {"sender": "worker 1", "receiver": "ps 1"}
    kill = Fault(0.0, "kill", ("ps 1",), 0.3, lines=lines)
    report = held(
        calm(ps=2, lane="shm", rules=(drop(Pull, 1, **pulls), before(Pull, 2, fault=kill, **pulls)))
    )
    assert report.killed == ("ps 1",)


@pytest.mark.parametrize("lasts_s", [0.05, 0.3])
def test_ps_that_lost_its_memory_while_it_is_asked_for_its_version_has_the_job_go_back(
    lasts_s: float,
) -> None:
    """The chief asks before it hears that the ps has a new life."""
    kill = Fault(0.0, "kill", ("ps 1",), lasts_s)
    rule = before(Read, 1, sender="chief 0", receiver="ps 1", fault=kill)
    trace = trace_of(calm(ps=2, lane="memory", keeps=True, save_secs=0.3, rules=(rule,)))
    assert trace.of("ps 1 restarted without parameters: restoring")
    assert trace.of("chief 0 ended: exit code 0")


def test_ps_that_is_killed_while_the_last_checkpoint_is_written_returns_to_write_it() -> None:
    """Its lease lasts for longer than the chief tries to save again."""
    kill = Fault(0.0, "kill", ("ps 1",), 0.05)
    rule = before(Save, 1, sender="chief 0", fault=kill)
    timing = USUAL.timing.model_copy(update={"heartbeat_s": 0.4, "lease_s": 1.6})
    trace = run(Fault(0.5, "interrupt"), lane="shm", keeps=True, rules=(rule,), timing=timing)
    assert trace.of("ps 1 is killed")
    assert trace.of("chief 0 ended: exit code 130")


def test_chief_stopped_while_it_waits_to_take_over_leaves_the_job_to_the_next_one() -> None:
    faults = (
        Fault(0.5, "kill", ("chief 0",), 0.3),
        Fault(0.6, "kill", ("ps 1",), 6.0),
        Fault(1.5, "interrupt"),
    )
    trace = trace_of(calm(lane="shm", faults=faults))
    assert len(trace.of("chief 0 ended: exit code 130")) == 1
    assert trace.of("ps 0 says: the run is over: step 10 of 10 is done")


def test_chief_stopped_while_it_joins_again_does_not_wait_for_missing_ps() -> None:
    faults = (
        Fault(0.5, "kill", ("ps 1",), 8.0),
        Fault(0.6, "kill", ("ps 0",), 0.5),
        Fault(2.0, "interrupt"),
    )
    told = trace_of(calm(steps=40, faults=faults)).of(
        "the chief is joining again|chief 0 ended|ps 1 starts"
    )
    assert [re.search("joining|exit code 130|starts", line)[0] for line in told[1:4]] == [
        "joining",
        "exit code 130",
        "starts",
    ]


def test_push_that_comes_to_a_shard_after_it_has_switched_counts_there_as_well() -> None:
    """The leader has counted it under hogwild, asking no other; nothing is left for its worker."""
    late = 0
    for steps, at_s in ((6, 0.3), (6, 0.6), (9, 0.4), (9, 0.8), (12, 0.8)):
        rule = delay(Push, receiver="ps 1", from_s=at_s - 0.1, until_s=at_s + 0.1, by_s=0.3)
        switch = Fault(at_s, "switch", spec="bounded-staleness:3")
        report = simulate(
            calm(policy="hogwild", steps=steps, lane="shm", faults=(switch,), rules=(rule,))
        )
        assert not report.broken, str(report)
        late += report.matched[0]
    assert late
