"""A coordinator that was packed and unpacked decides as the one that went on."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zmqtrain.coordination.coordinator import Coordinator
from zmqtrain.coordination.events import (
    Event,
    GivenUp,
    Joined,
    Left,
    Measured,
    PullArrived,
    PushArrived,
    PushesReported,
)
from zmqtrain.coordination.state import pack, unpack
from zmqtrain.policies import make_policy
from zmqtrain.protocol.orders import Answer, Apply, Order
from zmqtrain.wire.control import Close, Save, SwitchPolicy
from zmqtrain.wire.messages import Arrived

SPECS = (
    "hogwild",
    "bounded-staleness:1",
    "sync-replicas",
    "sync-replicas:aggregate=2",
    "sync-replicas:aggregate=5",
    "sync-replicas:aggregate=2,tokens=1",
)
WORKERS = 4

EVENT = st.tuples(st.sampled_from(["go", "go", "go", "leave", "join"]), st.integers(0, WORKERS - 1))


def play(coordinator: Coordinator, events: list[tuple[str, int]]) -> list[Order]:
    """Play events that can happen; return the orders given."""
    orders: list[Order] = []
    for kind, worker in events:
        member = coordinator.members.get(worker)
        if kind == "join" and member is None:
            orders += coordinator.handle(Joined(worker, worker + 1))
            orders += coordinator.handle(PullArrived(worker))
        elif kind == "leave" and member is not None:
            orders += coordinator.handle(Left(worker))
        elif kind == "go" and member is not None and member.state == "computing":
            batch = coordinator.ledger.leases[worker][0]
            finite = batch % 7 != 0
            event = PushArrived(worker, member.sequence + 1, batch, 10, finite)
            orders += coordinator.handle(event)
    return orders


@settings(max_examples=200)
@given(st.sampled_from(SPECS), st.lists(EVENT, max_size=40), st.lists(EVENT, max_size=40))
def test_coordinator_from_its_state_gives_the_same_orders(
    spec: str, before: list[tuple[str, int]], after: list[tuple[str, int]]
) -> None:
    coordinator = Coordinator(make_policy(spec), shards=1, workers=2, steps=20)
    play(coordinator, [("join", 0), ("join", 1), *before])
    other = unpack(pack(coordinator))
    assert play(other, after) == play(coordinator, after)
    assert pack(other) == pack(coordinator)


@pytest.mark.parametrize("switching", [False, True])
def test_state_under_a_switch_keeps_the_policy_to_come(switching: bool) -> None:
    coordinator = Coordinator(make_policy("hogwild"), shards=1, workers=2, steps=20)
    play(coordinator, [("join", 0), ("join", 1)])
    if switching:
        coordinator.handle(SwitchPolicy("sync-replicas"))
    other = unpack(pack(coordinator))
    events = [("go", 0), ("go", 1), ("go", 0), ("go", 1)]
    assert play(other, events) == play(coordinator, events)
    assert other.policy.spec == ("sync-replicas" if switching else "hogwild")


@pytest.mark.parametrize(
    "event",
    [
        Joined(3, 1_700_000_000_000),
        Left(3),
        PullArrived(3),
        PushArrived(3, 7, batch=12, examples=100, finite=False),
        PushesReported(2, Arrived((3,), (1_700_000_000_000,), (7,), (True,))),
        SwitchPolicy("hogwild"),
        Save("run/step-8"),
        Close(at_once=True),
        Measured(1, 7, 3**500),
        GivenUp(),
    ],
    ids=lambda event: type(event).__name__,
)
def test_event_is_read_from_the_journal_as_it_was(event: Event) -> None:
    assert unpack(pack(event)) == event


def test_arrivals_on_more_shards_than_a_word_has_bits_are_kept() -> None:
    coordinator = Coordinator(make_policy("hogwild:whole"), shards=70, workers=1, steps=9)
    play(coordinator, [("join", 0)])
    assert coordinator.handle(PushArrived(0, 1, 0)) == []
    for shard in range(1, 69):
        part = Arrived((0,), (1,), (1,), (True,))
        assert coordinator.handle(PushesReported(shard, part)) == []
    recovered = unpack(pack(coordinator))
    assert recovered.handle(PushesReported(68, part)) == []
    orders = recovered.handle(PushesReported(69, part))
    assert list(map(type, orders)) == [Apply, Answer]


@pytest.mark.parametrize("value", [object(), {"a": {1, 2.5, "x"}.__iter__()}, 1j])
def test_value_that_is_no_plain_data_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="not plain data"):
        pack(value)
