"""Scripts of what happens to a policy."""

from __future__ import annotations

from collections.abc import Callable

from tests import plays
from zmqtrain.policies import (
    Accumulate,
    Apply,
    Decision,
    Drop,
    Policy,
    Reduce,
    Release,
    make_policy,
)


def playing(spec: str, begun: str = "") -> Callable[[str], Policy]:
    """Return a function that plays a script to a new policy of a spec and returns the policy.

    A script has ``event -> answer`` lines; ``begun`` is played before it. Events: ``start VERSION
    WORKERS``, ``join W``, ``leave W``, ``push W``, ``drain``, and ``held``, whose answer is ``W
    waits for BY...``.
    """
    policy = make_policy(spec)

    def answer(text: str) -> str:
        event, *numbers = text.split()
        if event == "held":
            return plays.waits(policy.held())
        return plays.listed(map(_written, getattr(policy, event)(*map(int, numbers)) or ()))

    def play(script: str) -> Policy:
        plays.play(answer, begun + script)
        return policy

    return play


def _written(decision: Decision) -> str:
    match decision:
        case Reduce(workers):
            return f"reduce {' '.join(map(str, workers)) or 'the sum'}"
        case Drop(worker, reason):
            return f"drop {worker} {reason}"
        case Apply(worker) | Accumulate(worker) | Release(worker):
            return f"{type(decision).__name__.lower()} {worker}"
