"""When the job may end: what every shard can get has come to it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from zmqtrain.coordination.leader import Leader


@pytest.mark.parametrize(
    ("is_done", "finished", "all_delivered"),
    [(True, True, True), (False, True, False), (True, False, False), (True, None, False)],
    ids=["all is there", "orders are under way", "a push may be", "a stopped worker is unknown"],
)
def test_all_is_delivered_when_orders_are_carried_out_and_stopped_workers_were_answered(
    is_done: bool, finished: bool | None, all_delivered: bool
) -> None:
    """Worker 1 is still computing: nothing that was decided is on its way from there."""
    told = None if finished is None else SimpleNamespace(finished=finished)
    peers = SimpleNamespace(get=lambda role, index: told if index == 0 else None)
    leader: Any = SimpleNamespace(
        coordinator=SimpleNamespace(workers_by_state={"stopped": {0}, "computing": {1}}),
        delivery=SimpleNamespace(is_done=is_done),
        ps=SimpleNamespace(peers=peers),
    )
    assert Leader.all_delivered.fget(leader) is all_delivered  # type: ignore[attr-defined]


def test_nothing_is_delivered_of_a_job_that_has_not_begun() -> None:
    leader: Any = SimpleNamespace(coordinator=None)
    assert not Leader.all_delivered.fget(leader)  # type: ignore[attr-defined]
