"""Scripts of what happens to a policy."""

from __future__ import annotations

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


def play(spec: str, script: str) -> Policy:
    """Feed the policy of a spec a script of ``event -> answer`` lines; return the policy.

    Events: ``start VERSION WORKERS``, ``join W``, ``leave W``, ``push W``, ``drain``, and ``held``,
    whose answer is ``W waits for BY...``.
    """
    policy = make_policy(spec)

    def answer(text: str) -> str:
        event, *numbers = text.split()
        if event == "held":
            return plays.waits(policy.held())
        return plays.listed(map(_written, getattr(policy, event)(*map(int, numbers)) or ()))

    plays.play(answer, script)
    return policy


def _written(decision: Decision) -> str:
    match decision:
        case Reduce(workers):
            return f"reduce {' '.join(map(str, workers)) or 'the sum'}"
        case Drop(worker, reason):
            return f"drop {worker} {reason}"
        case Apply(worker) | Accumulate(worker) | Release(worker):
            return f"{type(decision).__name__.lower()} {worker}"
