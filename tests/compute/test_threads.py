"""Threads that share work: everything is done once, and done when the caller goes on."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from zmqtrain.compute.threads import ThreadTeam


@pytest.mark.parametrize("calls", [0, 1, 2, 50])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_call_is_made_once_by_any_number_of_threads(threads: int, calls: int) -> None:
    made: list[int] = []
    ThreadTeam(threads).run([partial(made.append, number) for number in range(calls)])
    assert sorted(made) == list(range(calls))


def test_calls_run_side_by_side_and_are_waited_for() -> None:
    meeting = threading.Barrier(2, timeout=10)
    met: list[int] = []

    def meet() -> None:
        met.append(meeting.wait())

    ThreadTeam(2).run([meet, meet])
    assert sorted(met) == [0, 1]


@pytest.mark.parametrize("bad", [0, 1, 5])
def test_error_of_a_call_is_raised_when_all_have_ended(bad: int) -> None:
    meeting, ended = threading.Barrier(2, timeout=10), []

    def call(number: int) -> None:
        if number < 2:
            meeting.wait()  # so that each of the first two has a thread of its own
        ended.append(number)
        if number == bad:
            raise RuntimeError(f"call {number}")

    with pytest.raises(RuntimeError, match=f"call {bad}"):
        ThreadTeam(2).run([partial(call, number) for number in range(6)])
    assert {0, 1, bad} <= set(ended)
    assert len(ended) == len(set(ended))
