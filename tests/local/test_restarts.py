"""Decisions about a restart, by the process's endings so far."""

from __future__ import annotations

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqtrain.config.restarts import (
    FIRST_DELAY_S,
    HEALTHY_S,
    LONGEST_DELAY_S,
    End,
    Ending,
    Limits,
    Restart,
    decide,
)
from zmqtrain.errors import ExitCode

KILLED = -signal.SIGKILL
LOST = int(ExitCode.PEER_LOST)
LIMITS = Limits(max_restarts=3, within_s=100)
UNLIMITED = Limits(max_restarts=10**6, within_s=600)


def lives(*each: tuple[int, float], apart_s: float = 0.0) -> list[Ending]:
    """Lives one after another, each by its return code and how long it lasted."""
    endings, now = [], 1000.0
    for returncode, lasted_s in each:
        endings.append(Ending(returncode, now, now + lasted_s))
        now += lasted_s + apart_s
    return endings


@pytest.mark.parametrize(
    ("returncode", "exit_code"),
    [
        (0, 0),
        (130, 130),
        (143, 143),
        (-signal.SIGINT, 130),  # before it could end in order
        (-signal.SIGTERM, 143),
    ],
)
def test_process_that_is_done_or_was_stopped_is_left_at_that(
    returncode: int, exit_code: int
) -> None:
    (ending,) = lives((returncode, 5.0))
    assert ending.exit_code == exit_code
    assert decide([ending], LIMITS, 0.0) == End()


@pytest.mark.parametrize("code", [1, 2, 65, 70, 74, 76, 77])
def test_code_that_says_a_restart_is_no_help_is_believed(code: int) -> None:
    assert decide(lives((code, 5.0)), LIMITS, 0.0) == End("a restart would not help")


def test_each_exit_code_is_decided_on() -> None:
    restarted = {
        code for code in ExitCode if isinstance(decide(lives((code, 5.0)), LIMITS, 0.0), Restart)
    }
    assert restarted == {ExitCode.PEER_LOST}


@pytest.mark.parametrize(
    "returncode", [KILLED, -signal.SIGSEGV, -signal.SIGABRT, LOST, 3, 120, 137]
)
def test_crash_is_restarted(returncode: int) -> None:
    assert decide(lives((returncode, 5.0)), LIMITS, 0.0) == Restart(FIRST_DELAY_S, 2, 100.0)


@pytest.mark.parametrize(("returncode", "code"), [(KILLED, 137), (3, 3)])
def test_crashes_beyond_the_budget_end_with_the_last_ones_code(returncode: int, code: int) -> None:
    endings = lives(*[(returncode, 5.0)] * 4)
    # The first of them ended 10 s ago.
    assert decide(endings[:-1], LIMITS, 0.0) == Restart(FIRST_DELAY_S, 0, 90.0)
    end = decide(endings, LIMITS, 0.0)
    assert isinstance(end, End)
    assert end.used_up and endings[-1].exit_code == code
    assert end.reason.startswith("its limit of 3 restarts within 100 s (")


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT])
def test_third_crash_of_compiled_code_ends_as_a_mistake_of_the_job(number: int) -> None:
    endings = lives((-number, 5.0), (KILLED, 1.0), (-signal.SIGSEGV, 50.0), (-number, 5.0))
    assert isinstance(decide(endings[:-1], Limits(10, 100), 0.0), Restart)
    end = decide(endings, Limits(10, 100), 0.0)
    assert isinstance(end, End)
    assert end.exit_code == ExitCode.USAGE
    assert "write to parameters" in end.reason


def test_crashes_of_compiled_code_that_are_far_apart_are_restarted() -> None:
    endings = lives(*[(-signal.SIGSEGV, 60.0)] * 9)
    assert isinstance(decide(endings, Limits(10, 100), 0.0), Restart)


def test_restarts_of_long_ago_do_not_count() -> None:
    old = lives(*[(KILLED, 1.0)] * 3)
    late = Ending(KILLED, old[-1].ended_at + 1, old[0].ended_at + 100)
    assert decide([*old, late], LIMITS, 0.0).left == 0  # the first of three has just gone
    later = Ending(KILLED, late.started_at, old[-1].ended_at + 100)
    assert decide([*old, later], LIMITS, 0.0).left == 2


def test_peer_that_is_lost_again_and_again_is_given_up_however_long_each_wait_is() -> None:
    endings = lives(*[(LOST, 70.0)] * 4)  # so that never more than one is within the budget's time
    assert isinstance(decide(endings[:-1], LIMITS, 0.0), Restart)
    assert decide(endings, LIMITS, 0.0) == End("its peer was lost 4 times in a row")


@pytest.mark.parametrize("between", [(KILLED, 70.0), (LOST, 100.0)], ids=["crash", "long life"])
def test_peer_that_was_found_meanwhile_is_not_given_up(between: tuple[int, float]) -> None:
    endings = lives((LOST, 70.0), (LOST, 70.0), between, (LOST, 70.0), (LOST, 70.0))
    assert isinstance(decide(endings, LIMITS, 0.0), Restart)


def test_delay_doubles_up_to_the_longest_and_begins_anew_after_a_healthy_life() -> None:
    endings = lives(*[(KILLED, 1.0)] * 10)
    delays = [decide(endings[: n + 1], UNLIMITED, 0.0).delay_s for n in range(len(endings))]
    assert delays == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0, 30.0])
    again = lives(*[(KILLED, 1.0)] * 10, (KILLED, HEALTHY_S), (KILLED, 1.0), (KILLED, 1.0))
    delays = [decide(again[: n + 1], UNLIMITED, 0.0).delay_s for n in range(10, 13)]
    assert delays == pytest.approx([0.2, 0.2, 0.4])


@given(
    st.lists(
        st.tuples(st.sampled_from([KILLED, LOST, 99]), st.floats(0, 2 * HEALTHY_S)), min_size=1
    ),
    st.floats(0, 1),
    st.integers(0, 12),
    st.floats(1, 1000),
)
def test_delays_and_budgets_keep_their_bounds(
    past: list[tuple[int, float]], jitter: float, max_restarts: int, within_s: float
) -> None:
    limits = Limits(max_restarts=max_restarts, within_s=within_s)
    decision = decide(lives(*past), limits, jitter)
    if isinstance(decision, Restart):
        assert FIRST_DELAY_S / 2 <= decision.delay_s <= LONGEST_DELAY_S
        assert 0 <= decision.left < max_restarts
    else:
        assert len(past) > max_restarts


@pytest.mark.parametrize(
    ("returncode", "text"),
    [
        (KILLED, "was killed by signal 9 (SIGKILL) after 2.5 s"),
        (-40, "was killed by signal 40 after 2.5 s"),
        (138, "ended with exit code 138 (PEER_LOST) after 2.5 s"),
        (3, "ended with exit code 3 after 2.5 s"),
    ],
)
def test_ending_is_told_in_words(returncode: int, text: str) -> None:
    assert str(Ending(returncode, 10.0, 12.5)) == text
