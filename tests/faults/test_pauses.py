"""Tasks that stand still for a while: stopped processes, and event loops that something blocks."""

from __future__ import annotations

import time
from itertools import cycle

import pytest

import zmqtrain
from simulation.faults import Fault
from tests.constants import Constants
from tests.traces import ON_A_BOARD, calm, trace_of
from zmqtrain import Job
from zmqtrain.compute import offload
from zmqtrain.config.timing import Timing
from zmqtrain.data import NoisyLine
from zmqtrain.models import LinearRegression
from zmqtrain.models.base import Batch, Gradients, Parameters
from zmqtrain.optim import SGD

SHORT_S, LONG_S = 0.4, 3.0  # less and more than a lease
HAS_LEFT = "it has left"
BEGINS_AGAIN = "joining again"
POLICIES = ("hogwild", "bounded-staleness:1", "sync-replicas")


@pytest.mark.parametrize(
    ("name", "lane"), list(zip(("ps 0", "ps 1", "chief 0", "worker 1"), cycle(("tcp", "shm"))))
)
def test_pause_shorter_than_a_lease_ends_no_life(name: str, lane: str) -> None:
    trace = trace_of(calm(lane=lane, faults=(Fault(0.4, "stop", (name,), SHORT_S),)))
    assert trace.of(f"{HAS_LEFT}|{BEGINS_AGAIN}") == []


@pytest.mark.parametrize(("policy", "lane"), list(zip(POLICIES, cycle(("tcp", "shm")))))
def test_worker_that_stood_still_for_longer_than_its_lease_begins_again(
    policy: str, lane: str
) -> None:
    away = Fault(0.6, "stop", ("chief 0",), 2 * LONG_S)  # so that the job is there when it wakes
    faults = (Fault(0.4, "stop", ("worker 1",), LONG_S), away)
    trace = trace_of(calm(policy=policy, lane=lane, faults=faults))
    left = trace.of(HAS_LEFT)
    assert len(left) == 2 and all("worker 1 has been silent for" in line for line in left)
    assert trace.of(f"worker 1 says: .*{BEGINS_AGAIN}")


@pytest.mark.parametrize("lasts_s", [SHORT_S, LONG_S], ids=["shorter", "longer"])
def test_member_of_a_board_that_stood_still_begins_again_after_its_lease(lasts_s: float) -> None:
    away = Fault(0.6, "stop", ("chief 0",), 2 * LONG_S)
    faults = (Fault(0.4, "stop", ("worker 1",), lasts_s), away)
    trace = trace_of(calm(**ON_A_BOARD, faults=faults))
    begins_again = trace.of(f"worker 1 says: .*{BEGINS_AGAIN}")
    assert bool(trace.of(HAS_LEFT)) == bool(begins_again) == (lasts_s == LONG_S)


@pytest.mark.parametrize(("policy", "name"), list(zip(POLICIES, cycle(("ps 0", "ps 1")))))
def test_ps_paused_for_longer_than_a_lease_ends_no_lease(name: str, policy: str) -> None:
    """What the others said meanwhile reaches it when it has already looked at its clock."""
    late = Fault(0.4, "cut", (name,), LONG_S + 0.1, mild=True)
    faults = (Fault(0.4, "stop", (name,), LONG_S), late)
    trace = trace_of(calm(policy=policy, faults=faults))
    assert trace.of(f"{HAS_LEFT}|{BEGINS_AGAIN}") == []


class Blocking(LinearRegression):
    """Takes long, once, where models are called that take no time: on the loop."""

    def loss_and_gradients(self, parameters: Parameters, batch: Batch, out: Gradients) -> float:
        calls.append(1)
        if len(calls) == 50:
            time.sleep(2.0)
        return super().loss_and_gradients(parameters, batch, out)


calls: list[int] = []


def test_event_loop_that_was_blocked_for_longer_than_a_lease_loses_nobody(
    constants: Constants, caplog: pytest.LogCaptureFixture
) -> None:
    """Every task is on that loop. One worker waits for the other, so only heartbeats tell of it."""
    constants(offload, LONG_S=float("inf"))
    calls.clear()
    job = Job(
        model=Blocking(), data=NoisyLine(), optimizer=SGD(0.1), policy="sync-replicas", steps=50
    )
    summary = zmqtrain.run(job, workers=2, ps=2, timing=Timing(heartbeat_s=0.05, lease_s=0.5))
    assert len(calls) > 50
    assert (summary.global_step, summary.pushes["applied"]) == (50, 100)
    assert HAS_LEFT not in caplog.text
    assert BEGINS_AGAIN not in caplog.text


@pytest.mark.parametrize("name", ["worker 1", "chief 0"])
def test_task_that_stood_still_for_longer_than_a_ps_may_be_silent_does_not_give_it_up(
    name: str,
) -> None:
    """What the ps said meanwhile reaches it when it has already looked at its clock."""
    lasts_s = 13.0
    faults = [
        Fault(0.4, "stop", (name,), lasts_s),
        Fault(0.4, "cut", (name,), lasts_s + 0.1, mild=True),
    ]
    if name == "worker 1":  # else the job is over when it wakes
        faults.append(Fault(0.5, "stop", ("worker 0",), lasts_s))
        faults.append(Fault(0.5, "stop", ("worker 2",), lasts_s))
    trace = trace_of(calm(policy="bounded-staleness:1", faults=tuple(faults)))
    assert trace.of("PeerLostError") == []
