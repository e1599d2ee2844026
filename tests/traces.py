"""Simulated runs in which nothing goes wrong but what a test has go wrong."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from simulation.drawing import draw
from simulation.run import Report, simulate
from simulation.schedule import LOCAL, Schedule
from zmqtrain.config.timing import Timing

_TIMING = Timing(
    heartbeat_s=0.2, lease_s=0.8, join_timeout_s=20.0, peer_timeout_s=12.0, grace_s=4.0
)
_CALM = replace(
    draw(1),
    ps=2,
    workers=3,
    policy="sync-replicas",
    steps=10,
    lane="tcp",
    prefetch=1,
    consistent_reads=False,
    in_chunks=False,
    timing=_TIMING,
    weather=LOCAL,
    slow=99,
    keeps=False,
    bad=frozenset(),
    faults=(),
)

ON_A_BOARD: dict[str, Any] = {"ps": 0, "workers": 3, "lane": "shm", "board": True}
"""Worker 0 hosts the ps."""


@dataclass(frozen=True)
class Trace:
    """All that was said and done in a run."""

    lines: tuple[str, ...]

    def of(self, pattern: str) -> list[str]:
        """Return the lines in which ``pattern`` is found."""
        return [line for line in self.lines if re.search(pattern, line)]


def calm(**fields: Any) -> Schedule:
    """Return a schedule without a fault; the fields given replace its own."""
    return replace(_CALM, **fields)


def held(schedule: Schedule) -> Report:
    """Run a schedule; that something does not hold, or a rule decided nothing, is an error."""
    report = simulate(schedule)
    _check(report)
    return report


def trace_of(schedule: Schedule) -> Trace:
    """Do the same and return the trace of it; what messages said is left out."""
    lines: list[str] = []
    report = simulate(schedule, lines.append, has_contents=False)
    _check(report)
    return Trace(tuple(lines))


def _check(report: Report) -> None:
    assert not report.broken, str(report)
    for rule, matched in zip(report.schedule.rules, report.matched, strict=True):
        assert matched >= min(rule.numbers or (1,)), (
            f"{rule} decided about none of {matched} messages"
        )
