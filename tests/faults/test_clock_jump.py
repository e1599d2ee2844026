"""A wall clock that is set while the job runs: no duration is measured by it."""

from __future__ import annotations

from itertools import cycle

import pytest

from simulation.faults import Fault
from tests.traces import calm, trace_of

HOUR_S = 3600.0
JUMPS_AT_S = 0.45  # after a heartbeat, before leases are looked at


@pytest.mark.parametrize(
    ("name", "jump_s"),
    list(zip((None, "worker 1", "worker 1", "chief 0", "ps 0", "ps 1"), cycle((HOUR_S, -HOUR_S)))),
)
def test_clock_that_is_set_by_an_hour_ends_no_life_and_no_job(
    name: str | None, jump_s: float
) -> None:
    """A task killed after it comes back as usual: incarnations still rise."""
    kills = () if name is None else (Fault(JUMPS_AT_S + 0.1, "kill", (name,), 0.2),)
    given = {"policy": "hogwild" if jump_s > 0 else "sync-replicas", "lane": "shm"}
    trace = trace_of(calm(**given, faults=kills, clock_set=(JUMPS_AT_S, jump_s)))
    left = [line for line in trace.of("it has left") if "worker 1 has died" not in line]
    assert left == []
    assert (trace.of("joining again") == []) == (name not in ("ps 0", "ps 1"))
