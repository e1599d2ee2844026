"""Tasks that are all told to leave, as when a machine is taken away: nothing is lost, none hangs.

They come back without their memory when the time that each had to leave is over. So the invariants
of a simulated run show whether the checkpoint that they left with holds all that was acknowledged.
"""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from simulation.faults import Fault
from tests.traces import Trace, calm, trace_of
from zmqtrain.config.timing import Timing

TIMING = Timing(heartbeat_s=0.2, lease_s=0.8, join_timeout_s=20, peer_timeout_s=12, grace_s=8)
SOON_S = 3.0  # after the last signal, in which a chief may wait for two seconds at an end
ALL = ("ps 0", "ps 1", "chief 0")


def drained(*names: str, gap_s: float = 0.0, at_s: float = 0.5, **fields: Any) -> Trace:
    """Tell tasks to leave, one after another; check that all of them do so at once."""
    faults = tuple(
        Fault(round(at_s + gap_s * n, 4), "terminate", (name,)) for n, name in enumerate(names)
    )
    usual = {"lane": "memory", "keeps": True, "save_secs": 1000.0, "steps": 40, "back_s": 9.0}
    given = {"leaves": True, "timing": TIMING, "faults": faults}
    trace = trace_of(calm(**usual | given | fields))
    assert not trace.of("leaving without")
    for name in names:
        (first, *_) = trace.of(f"{name} ended: exit code 143")
        assert float(first.split()[0]) < faults[-1].at + SOON_S
    return trace


@pytest.mark.parametrize("number", range(6))
def test_leaving_tasks_of_one_machine_lose_nothing(number: int) -> None:
    """In every order, at once or one after the other."""
    names = [*permutations(ALL)][number]
    gap_s = (0.004, 0.03, 0.2)[number % 3]
    policy = ("sync-replicas", "hogwild", "bounded-staleness:1")[number // 2]
    trace = drained(*names, gap_s=gap_s, policy=policy)
    assert trace.of("says: leaving after .*step-")


@pytest.mark.parametrize(
    ("names", "fields"),
    [
        (("ps 0", "chief 0"), {"ps": 1}),
        (("ps 2", "ps 0", "chief 0", "ps 1"), {"ps": 3}),
        (("ps 1", "worker 0", "ps 0", "worker 2", "chief 0"), {}),
        (("worker 0", "chief 0", "ps 1", "ps 0", "ps 1", "chief 0"), {}),
        (("ps 1", "ps 0"), {}),
    ],
    ids=["one ps", "three ps", "with workers", "told twice", "no chief"],
)
def test_leaving_tasks_of_any_kind_lose_nothing(
    names: tuple[str, ...], fields: dict[str, Any]
) -> None:
    """While others save, or often."""
    drained(*names, gap_s=0.01, save_secs=0.1 * (len(names) % 2), **fields)


@pytest.mark.parametrize("at_s", [0.0, 0.01, 0.03, 0.1])
def test_tasks_leave_at_once_while_the_job_begins(at_s: float) -> None:
    drained(
        "ps 2", "ps 1", "ps 0", "chief 0", at_s=at_s, gap_s=0.01, ps=3, policy="bounded-staleness:1"
    )


@pytest.mark.parametrize("names", [("ps 0", "chief 0", "ps 1"), ("ps 1", "ps 0", "chief 0")])
def test_tasks_leave_at_once_without_a_logdir(names: tuple[str, ...]) -> None:
    drained(*names, gap_s=0.01, keeps=False, lane="shm", back_s=0.3)


@pytest.mark.parametrize("first", ["worker 0", "worker 2"])
def test_workers_that_hold_the_parameters_leave_together(first: str) -> None:
    """Worker 0 hosts the chief, which would end the job."""
    others = [f"worker {n}" for n in range(4) if f"worker {n}" != first]
    hosts = {"ps": 0, "workers": 4, "hosts": True, "copies": 2, "policy": "hogwild:whole"}
    drained(first, *others, gap_s=0.003, at_s=1.6, save_secs=0.2, lane="tcp", **hosts)
