"""Schedules for the simulator in which nothing goes wrong but what a test has go wrong.

And the harness of the whole-run tests, for what needs real processes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from tests.harness import check_counts_fixture, stage
from zmqtrain.simulation.run import simulate
from zmqtrain.simulation.schedule import LOCAL, Schedule, draw
from zmqtrain.timing import Timing

__all__ = ["check_counts_fixture", "stage"]

TIMING = Timing(heartbeat_s=0.2, lease_s=0.8, join_timeout_s=20.0, peer_timeout_s=12.0, grace_s=4.0)
USUAL = replace(
    draw(1),
    ps=2,
    workers=3,
    policy="sync-replicas",
    steps=10,
    lane="tcp",
    prefetch=1,
    consistent_reads=False,
    in_pieces=False,
    timing=TIMING,
    weather=LOCAL,
    slow=99,
    keeps=False,
    bad=frozenset(),
    faults=(),
)


@dataclass(frozen=True)
class Tale:
    """All that was said and done in a run."""

    lines: tuple[str, ...]

    def of(self, pattern: str) -> list[str]:
        """Return the lines in which ``pattern`` is found."""
        return [line for line in self.lines if re.search(pattern, line)]


@pytest.fixture(scope="session")
def calm() -> Callable[..., Schedule]:
    """Makes a schedule without a fault; the fields given replace its own."""
    return lambda **fields: replace(USUAL, **fields)


@pytest.fixture(scope="session")
def held() -> Callable[[Schedule], None]:
    """Runs a schedule; that something does not hold is an error."""

    def run(schedule: Schedule) -> None:
        report = simulate(schedule)
        assert not report.broken, str(report)

    return run


@pytest.fixture(scope="session")
def tale_of() -> Callable[[Schedule], Tale]:
    """Does the same, and returns the tale of it: what messages said is left out."""

    def run(schedule: Schedule) -> Tale:
        lines: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("zmqtrain.simulation.run.decode", lambda frames: "a message")
            report = simulate(schedule, lines.append)
        assert not report.broken, str(report)
        return Tale(tuple(lines))

    return run
