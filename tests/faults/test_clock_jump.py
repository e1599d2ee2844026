"""A wall clock that is set while the job runs: no duration is measured by it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from simulation import fakes
from simulation.faults import Fault
from simulation.run import STARTS_AT
from tests.traces import calm, trace_of

HOUR_S = 3600.0
JUMPS_AT_S = 0.45  # after a heartbeat, before leases are looked at


@dataclass(frozen=True)
class WallClock:
    """Replaces the Unix time at which the simulator begins; it jumps once."""

    jump_s: float
    at_s: float = JUMPS_AT_S

    def __add__(self, now: float) -> float:
        has_jumped = now >= STARTS_AT + self.at_s
        return 1.6e9 + now + (self.jump_s if has_jumped else 0.0)


@pytest.mark.parametrize("jump_s", [HOUR_S, -HOUR_S])
@pytest.mark.parametrize("name", [None, "worker 1", "chief 0", "ps 0", "ps 1"], ids=str)
def test_clock_that_is_set_by_an_hour_ends_no_life_and_no_job(
    name: str | None, jump_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task killed after it comes back as usual: incarnations still rise."""
    monkeypatch.setattr(fakes, "UNIX_S", WallClock(jump_s))
    kills = () if name is None else (Fault(JUMPS_AT_S + 0.1, "kill", (name,), 0.2),)
    trace = trace_of(
        calm(policy="hogwild" if jump_s > 0 else "sync-replicas", lane="shm", faults=kills)
    )
    left = [line for line in trace.of("it has left") if "worker 1 has died" not in line]
    assert left == []
    assert (trace.of("joining again") == []) == (name not in ("ps 0", "ps 1"))
