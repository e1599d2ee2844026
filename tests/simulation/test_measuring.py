"""Updates that wait for the squares of all shards, and what dies or is lost meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from simulation.faults import Fault
from simulation.rules import Rule, before, drop
from tests.traces import calm, held
from zmqtrain.protocol.orders import Measure, Reduce
from zmqtrain.wire.messages import Orders, ShardReport


def has_measured(report: ShardReport) -> bool:
    return report.measured == 3


def orders(kind: type) -> Any:
    return lambda orders: any(isinstance(order, kind) for order in orders.orders)


def dying(task: str, point: str, how: str = "kill") -> Rule:
    """Return the rule by which a task dies just before a message of the third measure arrives."""
    kind, number, where = POINTS[point]
    return before(kind, number, fault=Fault(0.0, how, (task,), 0.3), where=where)


POINTS: dict[str, tuple[type, int, Any]] = {
    "measure": (Orders, 3, orders(Measure)),
    "report": (ShardReport, 1, has_measured),
    "update": (Orders, 3, orders(Reduce)),
}
"""Messages: their class, which of them, and a function that recognises them."""


FAULTS: dict[str, list[Rule]] = {
    "a measure is lost": [drop(Orders, 2, where=orders(Measure))],
    "a report is lost": [drop(ShardReport, 1, where=has_measured)],
    "an update is lost": [drop(Orders, 2, where=orders(Reduce))],
    **{
        f"{task} dies before a {point}": [dying(task, point)]
        for task in ("ps 0", "ps 1", "worker 1")
        for point in POINTS
    },
    "both ps die before a report": [dying("ps 0", "report"), dying("ps 1", "report")],
}


@pytest.mark.parametrize("rules", FAULTS.values(), ids=FAULTS)
def test_update_that_is_measured_counts_once_whatever_dies(rules: list[Rule]) -> None:
    held(calm(clips=True, lane="shm", rules=tuple(rules)))
