"""Hosts that return at once without their memory, where parts have copies: no step is lost."""

from __future__ import annotations

import re
from typing import Any

import pytest

from simulation.faults import Fault
from simulation.rules import Rule, before, delay, drop, duplicate
from simulation.schedule import Schedule
from tests.simulation.test_measuring import orders
from tests.simulation.test_successions import NEVER_S
from tests.traces import Trace, calm, trace_of
from zmqtrain.protocol.checkpoint import LastOrders
from zmqtrain.protocol.orders import Reduce
from zmqtrain.wire.control import EndGeneration, HandedOver, HandOver, Initialize
from zmqtrain.wire.messages import Orders, Push

HOSTED: dict[str, Any] = {
    **{"ps": 0, "workers": 3, "lane": "memory", "copies": 2},
    **{"keeps": True, "save_secs": NEVER_S, "steps": 4},
}


def kill(worker: int, **which: Any) -> Rule:
    """Return the rule by which a host is lost, with its memory, before a message arrives."""
    which = {"kind": Push, "number": 4, "sender": "worker 1"} | which
    fault = Fault(0.0, "kill", (f"worker {worker}",), 0.1)
    return before(which.pop("kind"), which.pop("number"), fault=fault, **which)


def without(*rules: Rule, **fields: Any) -> Schedule:
    return calm(**HOSTED | {"rules": rules} | fields)


def goes_on_at(trace: Trace) -> int:
    """Return the step from which all shards go on, of which nothing before is lost."""
    *_, line = trace.of("restarted without parameters: .* without a step lost")
    (step,) = re.findall(r"at step (\d+) ", line)
    assert len(trace.of(f"begins at version {step}, from .*step-0*{step}$")) >= 3
    return int(step)


@pytest.mark.parametrize(("worker", "hosts"), [(0, False), (0, True), (2, True)])
@pytest.mark.parametrize(("policy", "steps"), [("sync-replicas", 4), ("hogwild:whole", 12)])
def test_job_goes_on_where_it_was(policy: str, steps: int, worker: int, hosts: bool) -> None:
    trace = trace_of(without(kill(worker), policy=policy, steps=steps, hosts=hosts))
    assert goes_on_at(trace) >= 1
    assert not trace.of("group 2")


@pytest.mark.parametrize(("worker", "late", "other"), [(2, 1, 2), (0, 2, 1)])
def test_orders_that_do_not_come_to_one_ps_are_carried_out_there(
    worker: int, late: int, other: int
) -> None:
    """The host is lost, maybe with the leader, when the others have made the first step."""
    again = {"number": 2, "sender": "worker 0", "receiver": f"worker {other}"}
    rules = (
        kill(worker, kind=Orders, where=orders(Reduce), **again),
        drop(Orders, *range(1, 8), receiver=f"worker {late}", where=orders(Reduce)),
    )
    assert goes_on_at(trace_of(without(*rules))) == 1


def test_part_that_is_lost_with_its_copy_goes_back_to_the_beginning() -> None:
    trace = trace_of(without(kill(1), kill(2)))
    (line,) = trace.of("copies of others cannot replace them")
    assert "ps 1 and ps 2 restarted" in line
    assert "parts are lost with all of their copies, on worker 1, worker 2" in line
    assert len(trace.of("generation 2 begins at version 0")) == 3


def test_job_whose_hosts_all_return_without_memory_begins_again() -> None:
    trace = trace_of(without(kill(0), kill(1), kill(2)))
    (line,) = trace.of("ps 0 and ps 1 and ps 2 restarted without parameters")
    assert "restoring the beginning" in line


def test_messages_may_be_lost_or_come_late_or_twice() -> None:
    rules = (
        drop(EndGeneration, 1),
        drop(LastOrders, 1),
        duplicate(EndGeneration, 2),
        delay(EndGeneration, 3, by_s=1.0),
        drop(HandOver, 1),
        drop(HandedOver, 1),
        duplicate(HandOver, 2),
    )
    assert goes_on_at(trace_of(without(kill(2), *rules))) >= 1


@pytest.mark.parametrize(
    ("who", "kind"), [("chief 0", EndGeneration), ("worker 2", HandOver), ("chief 0", Initialize)]
)
def test_hand_over_begins_again_if_one_dies_in_it(who: str, kind: type) -> None:
    """But not if a ps does that holds copies."""
    number = 4 if kind is Initialize else 1  # three begin generation 1
    again = before(kind, number, fault=Fault(0.0, "kill", (who,), 0.1))
    assert goes_on_at(trace_of(without(kill(2), again))) >= 1
