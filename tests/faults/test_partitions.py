"""Tasks that do not reach one another, in one direction or in both; and links that are slow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulation.faults import Fault
from simulation.rules import drop
from simulation.schedule import LOCAL
from tests.traces import calm, held, trace_of
from zmqtrain.config.timing import Timing

AT_S = 0.4  # when a partition begins
SHORT_S, LONG_S = 0.5, 1.2  # less and more than a lease
HAS_LEFT = "it has left"
BEGINS_AGAIN = "joining again"


@pytest.mark.parametrize(
    ("sender", "receiver"),
    [
        ("worker 1", "ps 0"),
        ("ps 0", "worker 1"),
        ("worker 1", "ps 1"),
        ("ps 1", "worker 1"),
        ("chief 0", "ps 0"),
        ("ps 0", "chief 0"),
        ("ps 1", "ps 0"),
        ("ps 0", "ps 1"),
    ],
)
def test_only_a_worker_that_is_not_heard_for_longer_than_its_lease_is_done_without(
    sender: str, receiver: str
) -> None:
    """Who is not answered is not given up; what was lost is said again."""
    for policy, lasts_s in (("bounded-staleness:1", SHORT_S), ("sync-replicas", LONG_S)):
        ends_s = AT_S + lasts_s
        lost = drop(object, sender=sender, receiver=receiver, from_s=AT_S, until_s=ends_s)
        trace = trace_of(calm(policy=policy, steps=12, rules=(lost,)))
        assert trace.of(f"{sender} -- {receiver}.* lost: |{receiver} -- {sender}.* lost: ")
        left = trace.of(HAS_LEFT)
        if sender == "worker 1" and lasts_s == LONG_S:
            (line,) = left
            assert f"{receiver} says: worker 1 has been silent for" in line
        else:
            assert left == trace.of(BEGINS_AGAIN) == []


@pytest.mark.parametrize("keeps", [True, False], ids=["late", "lost"])
@pytest.mark.parametrize(
    "names",
    [("worker 1",), ("ps 0",), ("chief 0",), ("ps 1", "worker 0", "worker 1"), ("ps 0", "ps 1")],
    ids=", ".join,
)
def test_cluster_that_falls_apart_goes_on_when_it_is_whole_again(
    names: tuple[str, ...], keeps: bool
) -> None:
    policy, lasts_s = ("hogwild", SHORT_S) if keeps else ("sync-replicas", LONG_S)
    held(calm(policy=policy, faults=(Fault(AT_S, "cut", names, lasts_s, mild=keeps),)))


@pytest.mark.parametrize("policy", ["hogwild", "sync-replicas"])
def test_link_that_takes_half_a_lease_for_a_chunk_ends_no_life(policy: str) -> None:
    """A gradient takes longer than a lease. Heartbeats wait in line behind its chunks."""
    timing = Timing(heartbeat_s=0.2, lease_s=1.0, peer_timeout_s=2.0, grace_s=30.0)
    link = {"weather": replace(LOCAL, large_s=timing.lease_s / 2), "timing": timing}
    trace = trace_of(calm(policy=policy, ps=1, workers=2, steps=4, in_chunks=True, **link))
    assert trace.of(f"{HAS_LEFT}|{BEGINS_AGAIN}|has been silent") == []
