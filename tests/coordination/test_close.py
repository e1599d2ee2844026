"""Ending a run early: what is being computed counts, and nothing more is begun."""

from __future__ import annotations

import pytest

from tests.coordination.plays import coordinator, playing
from zmqtrain.coordination.events import Event, GivenUp
from zmqtrain.coordination.state import pack, unpack
from zmqtrain.wire.control import Close


def test_gradients_under_way_are_counted_before_everyone_stops() -> None:
    run = coordinator("hogwild", joined=2)
    playing(run)("""
        pull 0     -> answer 0 with 0
        pull 1     -> answer 1 with 1
        close      -> -
        push 0 1 0 -> apply 0
        held       -> 0 waits for 1
        push 1 1 1 -> apply 1, answer 0 stop, answer 1 stop
        held       -> -
    """)
    assert run.finished
    assert run.ledger.open_batches() == ()


def test_step_under_way_is_completed_before_everyone_stops() -> None:
    run = coordinator("sync-replicas", joined=2)
    playing(run)("""
        pull 0     -> -
        pull 1     -> answer 0 with 0, answer 1 with 1
        push 0 1 0 -> -
        close      -> -
        push 1 1 1 -> reduce 0 1, answer 0 stop, answer 1 stop
    """)
    assert run.version == 1


def test_worker_that_dies_meanwhile_is_not_waited_for() -> None:
    run = coordinator("bounded-staleness:3", joined=2)
    playing(run)("""
        pull 0     -> answer 0 with 0
        pull 1     -> answer 1 with 1
        close      -> -
        push 0 1 0 -> apply 0
        leave 1    -> answer 0 stop
    """)
    assert run.ledger.open_batches() == (1,)


def test_step_that_a_worker_holds_up_ends_without_it_if_time_is_short() -> None:
    run = coordinator("sync-replicas", joined=2)
    playing(run)("""
        pull 0        -> -
        pull 1        -> answer 0 with 0, answer 1 with 1
        close         -> -
        push 0 1 0    -> -
        close at-once -> reduce 0, answer 0 stop
        push 1 1 1    -> drop 1 the job is complete, answer 1 stop
    """)
    assert run.version == run.steps == 1
    assert run.ledger.open_batches() == (1,)


def test_accumulated_gradient_of_a_worker_that_computes_on_counts_at_a_hurried_end() -> None:
    """Its worker was told so, and begins no other step."""
    run = coordinator("sync-replicas:aggregate=3", joined=2)
    playing(run)("""
        pull 0        -> -
        pull 1        -> answer 0 with 0, answer 1 with 1
        push 0 1 0    -> accumulate 0, answer 0 with 2
        close         -> -
        close at-once -> reduce
        push 0 2 2    -> drop 0 the job is complete, answer 0 stop
    """)
    assert run.applied == 1
    assert run.ledger.open_batches() == (1, 2)


def test_run_without_workers_ends_at_once() -> None:
    run = coordinator("sync-replicas")
    playing(run)("close -> -")
    assert run.finished


def test_close_of_a_finished_run_changes_nothing() -> None:
    run = coordinator("hogwild", joined=1, workers=1, steps=1)
    playing(run)("""
        pull 0     -> answer 0 with 0
        push 0 1 0 -> apply 0, answer 0 stop
        close      -> -
    """)
    assert run.version == run.steps == 1


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
