from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from zmqtrain.policies import (
    Accumulate,
    Apply,
    Decision,
    Drop,
    Held,
    Policy,
    Reduce,
    Release,
    make_policy,
)

Play = Callable[[str, str], Policy]


@pytest.fixture(scope="session")
def play() -> Play:
    """Feed the policy of a spec a script of ``event -> answer`` lines; return the policy.

    Events: ``start VERSION WORKERS``, ``join W``, ``leave W``, ``push W``, ``drain``, and ``held``,
    whose answer is ``W waits for BY...``. Nothing is written as ``-``.
    """

    def run(spec: str, script: str) -> Policy:
        policy = make_policy(spec)
        history: list[str] = []
        for line in filter(str.strip, script.splitlines()):
            event, expected = (part.strip() for part in line.split("->"))
            answer = _answer(policy, *event.split())
            history.append(f"{event} -> {answer}")
            if answer != expected:
                raise AssertionError("\n".join([*history, f"expected: {expected}"]))
        return policy

    return run


def _answer(policy: Policy, event: str, *numbers: str) -> str:
    if event == "held":
        return _listed(_told(held) for held in policy.held())
    decisions = getattr(policy, event)(*map(int, numbers))
    return _listed(_written(decision) for decision in decisions or ())


def _told(held: Held) -> str:
    return f"{held.worker} waits for {' '.join(map(str, held.by)) or 'nobody'}"


def _written(decision: Decision) -> str:
    match decision:
        case Reduce(workers):
            return f"reduce {' '.join(map(str, workers)) or 'the sum'}"
        case Drop(worker, reason):
            return f"drop {worker} {reason}"
        case Apply(worker) | Accumulate(worker) | Release(worker):
            return f"{type(decision).__name__.lower()} {worker}"


def _listed(texts: Iterable[str]) -> str:
    return ", ".join(texts) or "-"
