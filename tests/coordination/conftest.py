from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from zmqtrain.coordination.coordinator import Coordinator
from zmqtrain.policies import Held, make_policy
from zmqtrain.wire.messages import Order

Play = Callable[[Coordinator, str], None]


@pytest.fixture(scope="session")
def play() -> Play:
    """Feed a coordinator a script of ``event -> answer`` lines.

    Events: ``join W INCARNATION``, ``leave W``, ``pull W``, ``push W SEQUENCE BATCH`` (both are
    at shard 0, ``at SHARD`` puts them elsewhere, ``bad`` makes a gradient non-finite), ``switch
    SPEC``, ``close``, ``give-up``, and ``held``, whose answer is ``W waits for BY...``. Nothing is
    written as ``-``.
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
            orders = coordinator.join(int(worker), int(incarnation))
        case ["leave", worker]:
            orders = coordinator.leave(int(worker))
        case ["pull", worker, *where]:
            orders = coordinator.arrived(int(worker), 0, _shard(where))
        case ["push", worker, sequence, batch, *where]:
            shard = _shard(where)
            orders = coordinator.arrived(
                int(worker),
                int(sequence),
                shard,
                finite="bad" not in where,
                batch=int(batch) if shard == 0 else -1,
            )
        case ["switch", spec]:
            coordinator.switch(make_policy(spec))
            orders = coordinator.settle()
        case ["close"]:
            coordinator.close()
            orders = coordinator.settle()
        case ["give-up"]:
            coordinator.give_up()
            orders = coordinator.settle()
        case _:
            raise ValueError(f"no such event: {event}")
    return _listed(map(_told, orders))


def _shard(where: list[str]) -> int:
    return int(where[where.index("at") + 1]) if "at" in where else 0


def _told(order: Order) -> str:
    batches = " ".join(map(str, order.batches))
    details = [order.text, f"with {batches}" if batches else "", "stop" if order.stop else ""]
    return " ".join(filter(None, [order.kind, *map(str, order.workers), *details]))


def _reason(held: Held) -> str:
    return f"{held.worker} waits for {' '.join(map(str, held.by)) or 'nobody'}"


def _listed(texts: Iterable[str]) -> str:
    return ", ".join(texts) or "-"
