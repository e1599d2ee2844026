"""When the job may end: what every shard can get has come to it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from zmqtrain.coordination.coordinator import Member
from zmqtrain.coordination.leader import Leader
from zmqtrain.coordination.membership import PARKED


@pytest.mark.parametrize(
    ("is_done", "parked", "is_settled"),
    [(True, 1.0, True), (False, 1.0, False), (True, 0.0, False), (True, None, False)],
    ids=["all is there", "orders are under way", "a push may be", "a stopped worker is unknown"],
)
def test_job_is_settled_when_orders_are_carried_out_and_stopped_workers_were_answered(
    is_done: bool, parked: float | None, is_settled: bool
) -> None:
    """Worker 1 is still computing: nothing that was decided is on its way from there."""
    members = {0: Member(1, stopped=True), 1: Member(2)}
    told = None if parked is None else SimpleNamespace(facts={PARKED: parked})
    peers = SimpleNamespace(get=lambda role, index: told if index == 0 else None)
    leader: Any = SimpleNamespace(
        coordinator=SimpleNamespace(members=members),
        delivery=SimpleNamespace(is_done=is_done),
        ps=SimpleNamespace(peers=peers),
    )
    assert Leader.is_settled.fget(leader) is is_settled  # type: ignore[attr-defined]


def test_job_that_has_not_begun_is_not_settled() -> None:
    leader: Any = SimpleNamespace(coordinator=None)
    assert not Leader.is_settled.fget(leader)  # type: ignore[attr-defined]
