"""Whether a process that ended is started again, and when: decided by its past alone."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TypeAlias

from zmqtrain.errors import ExitCode

FIRST_DELAY_S = 0.2
LONGEST_DELAY_S = 30.0
HEALTHY_S = 5.0
"""A life that lasted so long went well: the delays begin anew after it."""

_WANTED = frozenset({ExitCode.OK, ExitCode.INTERRUPTED, ExitCode.TERMINATED})
"""Whoever stopped a process by a signal meant it, whether or not it came to end in order."""

_FINAL = frozenset(set(ExitCode) - {ExitCode.PEER_LOST})
"""Of the codes that zmqtrain knows, only that of a lost peer says that another life may fare
better. Those that it does not know, and death by any other signal, are crashes."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How many restarts a process is worth: ``max_restarts`` within any ``within_s`` seconds."""

    max_restarts: int
    within_s: float


USUAL_LIMITS = Limits(10, 600.0)


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of one life of a process. Times are of the monotonic clock.

    ``returncode`` is as `subprocess` has it: -n says that signal n killed it.
    """

    returncode: int
    started_at: float
    ended_at: float

    @property
    def lasted_s(self) -> float:
        return self.ended_at - self.started_at

    @property
    def exit_code(self) -> int:
        """The code with which a process ends that stands for this one: 128 + n for signal n."""
        return self.returncode if self.returncode >= 0 else 128 - self.returncode

    def __str__(self) -> str:
        after = f"after {self.lasted_s:.1f} s"
        if self.returncode < 0:
            number = -self.returncode
            names = {each.value: f" ({each.name})" for each in signal.Signals}
            return f"was killed by signal {number}{names.get(number, '')} {after}"
        known = {each.value: f" ({each.name})" for each in ExitCode}
        return f"ended with exit code {self.returncode}{known.get(self.returncode, '')} {after}"


@dataclass(frozen=True, slots=True)
class Restart:
    """Start it again in ``delay_s`` seconds; ``left`` restarts of the budget remain after that."""

    delay_s: float
    left: int


@dataclass(frozen=True, slots=True)
class End:
    """There is no further life; no reason is needed where all went as wanted."""

    reason: str = ""


Decision: TypeAlias = Restart | End


def decide(endings: Sequence[Ending], limits: Limits, jitter: float) -> Decision:
    """Return what follows from the last of these endings, the oldest of which comes first.

    ``jitter`` from 0 to 1 shortens the delay by up to a half, so that processes that died of one
    cause do not all come back at the same moment.
    """
    last = endings[-1]
    if last.exit_code in _WANTED:
        return End()
    if last.returncode in _FINAL:
        return End("a restart would not help")
    counted = sum(last.ended_at - each.ended_at < limits.within_s for each in endings[:-1])
    if counted >= limits.max_restarts:
        return End(f"{limits.max_restarts} restarts within {limits.within_s:g} s are used up")
    if _losses_in_a_row(endings, limits) > limits.max_restarts:
        return End(f"its peer was lost {limits.max_restarts + 1} times in a row")
    return Restart(_delay_s(endings, jitter), limits.max_restarts - counted - 1)


def _losses_in_a_row(endings: Sequence[Ending], limits: Limits) -> int:
    """Count the last lives that were spent on waiting for a peer.

    Each of them may take so long that no budget within a time is ever used up.
    """
    row = takewhile(
        lambda each: each.returncode == ExitCode.PEER_LOST and each.lasted_s < limits.within_s,
        reversed(endings),
    )
    return sum(1 for _ in row)


def _delay_s(endings: Sequence[Ending], jitter: float) -> float:
    short = takewhile(lambda each: each.lasted_s < HEALTHY_S, reversed(endings))
    delay_s = FIRST_DELAY_S
    for _ in list(short)[1:]:
        delay_s = min(2 * delay_s, LONGEST_DELAY_S)
    return delay_s * (1 - jitter / 2)
