"""A coordinator, and scripts of what happens to it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

from tests import plays
from zmqtrain.coordination import waiting
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
from zmqtrain.optim.outer import CLOSES, OPENS
from zmqtrain.policies import Policy, make_policy
from zmqtrain.protocol.orders import (
    Accumulate,
    Answer,
    Apply,
    Drop,
    Order,
    Rate,
    Reduce,
    Roster,
    Snapshot,
    Switch,
)
from zmqtrain.wire.control import Close, Extend, SwitchPolicy
from zmqtrain.wire.messages import Arrived


def coordinator(policy: str | Policy, *, joined: int = 0, **fields: Any) -> Coordinator:
    """Return the coordinator of a job of 100 steps that has one shard and expects two workers.

    ``joined``: number of workers that have begun their first lives.
    """
    defaults = {"shards": 1, "workers": 2, "steps": 100, "lookahead": 0}
    policy = make_policy(policy) if isinstance(policy, str) else policy
    run = Coordinator(policy, **defaults | fields)
    for worker in range(joined):
        run.handle(Joined(worker, 1))
    return run


def playing(run: Coordinator) -> Callable[[str], None]:
    """Return a function that plays a script of ``event -> answer`` lines to a coordinator.

    Events: ``join W INCARNATION``, ``leave W``, ``pull W``, ``push W SEQUENCE BATCH`` (at shard 0;
    ``at SHARD`` names another one, ``bad`` makes the gradient non-finite, ``of N`` is the result of
    a round), ``switch SPEC``, ``extend LIMIT``, ``close``, ``give-up``, and ``held``, whose answer
    is ``W waits for BY...``. Orders for rounds end with ``alone``, or ``of N steps``; of results
    that are applied alone they also tell the number of workers, and the place in a cycle. ``open``
    asks for the batches that are open, and ``.version`` and the like for an attribute.
    """
    return partial(plays.play, partial(_answer, run))


def _answer(run: Coordinator, text: str) -> str:
    if text == "held":
        return plays.waits(waiting.held(run))
    if text == "open":
        return plays.listed(map(str, run.ledger.open_batches()))
    if text.startswith("."):
        return str(attrgetter(text[1:])(run))
    return plays.listed(map(_told, run.handle(_event(run, text))))


def _event(run: Coordinator, text: str) -> Event:
    match text.split():
        case ["join", worker, incarnation]:
            return Joined(int(worker), int(incarnation))
        case ["leave", worker]:
            return Left(int(worker))
        case ["extend", limit]:
            return Extend(int(limit))
        case ["pull", worker]:
            return PullArrived(int(worker))
        case ["push", worker, sequence, batch, *where]:
            finite = "bad" not in where
            if "at" not in where:
                batches = int(where[where.index("of") + 1]) if "of" in where else 1
                numbers = int(worker), int(sequence), int(batch)
                return PushArrived(*numbers, finite=finite, batches=batches)
            life = run.members[int(worker)].incarnation
            part = Arrived((int(worker),), (life,), (int(sequence),), (finite,))
            return PushesReported(int(where[where.index("at") + 1]), part)
        case ["switch", spec]:
            return SwitchPolicy(spec)
        case ["close", *how]:
            return Close(at_once="at-once" in how)
        case ["give-up"]:
            return GivenUp()
    raise ValueError(f"no such event: {text}")


def _told(order: Order) -> str:
    """Return an order's name in lower case, and what tells it from others of its kind."""
    name = type(order).__name__.lower()
    match order:
        case Apply(worker, local_steps=steps, among=among, cycle=cycle) if steps:
            places = {OPENS: ["opens"], CLOSES: ["closes"], 0: ["within"]}
            return _words(name, worker, "of", steps, "among", among, *places.get(cycle, []))
        case Answer(worker, batches=batches, stop=stop, local_steps=steps):
            given = ["with", *batches] if batches else []
            return _words(name, worker, *given, *["stop"] * stop, *["alone"] * (steps > 0))
        case Drop(worker, reason):
            return _words(name, worker, reason)
        case Reduce(workers, local_steps=steps) if steps:
            return _words(name, *workers, "of", steps, "steps")
        case Apply() | Accumulate() | Reduce() | Roster():
            return _words(name, *order.workers)
        case Switch(text) | Snapshot(text) | Rate(text):
            return _words(name, text)


def _words(*given: object) -> str:
    return " ".join(map(str, given))
