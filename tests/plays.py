"""Scripts of ``event -> answer`` lines, for tests of what is pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from zmqtrain.policies import Held


def play(answer: Callable[[str], str], script: str) -> None:
    """Ask for the answer to each event of a script; nothing is written as ``-``."""
    history: list[str] = []
    for line in filter(str.strip, script.splitlines()):
        event, expected = (part.strip() for part in line.split("->"))
        told = answer(event)
        history.append(f"{event} -> {told}")
        if told != expected:
            raise AssertionError("\n".join([*history, f"expected: {expected}"]))


def listed(texts: Iterable[str]) -> str:
    return ", ".join(texts) or "-"


def waits(held: Iterable[Held]) -> str:
    """Return the answer to ``held``: ``W waits for BY...`` for each worker."""
    return listed(f"{w.worker} waits for {' '.join(map(str, w.by)) or 'nobody'}" for w in held)
