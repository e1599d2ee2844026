from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from zmqtrain.coordination.coordinator import Coordinator
from zmqtrain.coordination.events import (
    Event,
    GivenUp,
    Joined,
    Left,
    PullArrived,
    PushArrived,
    PushesReported,
)
from zmqtrain.policies import Held
from zmqtrain.wire.messages import Arrived, Close, Extend, Order, SwitchPolicy

Play = Callable[[Coordinator, str], None]


@pytest.fixture(scope="session")
def play() -> Play:
    """Feed a coordinator a script of ``event -> answer`` lines.

    Events: ``join W INCARNATION``, ``leave W``, ``pull W``, ``push W SEQUENCE BATCH`` (it is
    at shard 0, ``at SHARD`` puts them elsewhere, ``bad`` makes a gradient non-finite), ``switch
    SPEC``, ``extend LIMIT``, ``close``, ``give-up``, and ``held``, whose answer is ``W waits for
    BY...``. Nothing is written as ``-``.
    """

    def run(coordinator: Coordinator, script: str) -> None:
        history: list[str] = []
        for line in filter(str.strip, script.splitlines()):
            event, expected = (part.strip() for part in line.split("->"))
            answer = _answer(coordinator, event)
            history.append(f"{event} -> {answer}")
            if answer != expected:
                raise AssertionError("\n".join([*history, f"expected: {expected}"]))

    return run


def _answer(coordinator: Coordinator, event: str) -> str:
    match event.split():
        case ["held"]:
            return _listed(map(_reason, coordinator.held()))
        case ["join", worker, incarnation]:
            orders = coordinator.handle(Joined(int(worker), int(incarnation)))
        case ["leave", worker]:
            orders = coordinator.handle(Left(int(worker)))
        case ["extend", limit]:
            orders = coordinator.handle(Extend(int(limit)))
        case ["pull", worker]:
            orders = coordinator.handle(PullArrived(int(worker)))
        case ["push", worker, sequence, batch, *where]:
            shard = int(where[where.index("at") + 1]) if "at" in where else 0
            finite = "bad" not in where
            event: Event = PushArrived(int(worker), int(sequence), int(batch), finite=finite)
            if shard:
                life = coordinator.members[int(worker)].incarnation
                part = Arrived((int(worker),), (life,), (int(sequence),), (finite,))
                event = PushesReported(shard, part)
            orders = coordinator.handle(event)
        case ["switch", spec]:
            orders = coordinator.handle(SwitchPolicy(spec))
        case ["close", *how]:
            orders = coordinator.handle(Close(at_once="at-once" in how))
        case ["give-up"]:
            orders = coordinator.handle(GivenUp())
        case _:
            raise ValueError(f"no such event: {event}")
    return _listed(map(_told, orders))


def _told(order: Order) -> str:
    batches = " ".join(map(str, order.batches))
    details = [order.text, f"with {batches}" if batches else "", "stop" if order.stop else ""]
    return " ".join(filter(None, [order.kind, *map(str, order.workers), *details]))


def _reason(held: Held) -> str:
    return f"{held.worker} waits for {' '.join(map(str, held.by)) or 'nobody'}"


def _listed(texts: Iterable[str]) -> str:
    return ", ".join(texts) or "-"
