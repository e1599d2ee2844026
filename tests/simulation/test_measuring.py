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


def kill(name: str) -> Fault:
    return Fault(0.0, "kill", (name,), 0.3)


POINTS: dict[str, list[Rule]] = {
    "a measure is lost": [drop(Orders, 2, where=orders(Measure))],
    "a report is lost": [drop(ShardReport, 1, where=has_measured)],
    "an update is lost": [drop(Orders, 2, where=orders(Reduce))],
    **{
        f"{task} dies before {what}": [before(kind, 2, fault=kill(task), where=where)]
        for task in ("ps 0", "ps 1", "worker 1")
        for what, kind, where in (
            ("a measure comes", Orders, orders(Measure)),
            ("a report comes", ShardReport, lambda report: report.measured > 0),
            ("an update comes", Orders, orders(Reduce)),
        )
    },
    "both ps die before a report comes": [
        before(ShardReport, 1, fault=Fault(0.0, "kill", ("ps 0", "ps 1"), 0.3), where=has_measured)
    ],
}


@pytest.mark.parametrize("rules", POINTS.values(), ids=POINTS)
def test_update_that_is_measured_counts_once_whatever_dies(rules: list[Rule]) -> None:
    held(calm(clips=True, lane="shm", rules=tuple(rules)))
