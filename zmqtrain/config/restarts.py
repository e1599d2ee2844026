"""Whether and when a process that ended is restarted; the decision depends only on its past."""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile

from zmqtrain.errors import ConfigError, ExitCode
from zmqtrain.units import counted

SUPERVISED_SINCE = "ZMQTRAIN_SUPERVISED_SINCE"
"""Variable with the Unix time at which the supervisor of this process began."""

FIRST_DELAY_S = 0.2
LONGEST_DELAY_S = 30.0
MAX_FAULTS = 3
"""Crashes of compiled code, within the limits' time, after which a process is given up."""

HEALTHY_S = 5.0
"""A process that ran for this long was healthy: the delays start again from the first."""


FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)
"""Signals of a crash in compiled code: the same step would crash again."""


def supervised_since(environ: Mapping[str, str]) -> float:
    """Return the Unix time at which the supervisor of this process began, infinity without one.

    Raises:
        ConfigError: the variable holds no time.
    """
    text = environ.get(SUPERVISED_SINCE, "").strip() or "inf"
    try:
        since = float(text)
    except ValueError:
        since = math.nan
    if math.isnan(since):
        raise ConfigError(
            f"{SUPERVISED_SINCE} is {text!r:.80}; expected a Unix time in seconds, as zmqtrain "
            "supervise sets it; remove the variable"
        )
    return since


class Advice(StrEnum):
    """Whether to start a task again that has ended, in the words of the documentation."""

    DONE = ""  # it ended as wanted
    NO = "no"  # the next life would end in the same way
    ELSEWHERE = "if it was moved"  # it was stopped; an engine may start it elsewhere
    YES = "yes"


def advice(exit_code: int) -> Advice:
    """Return the advice on a task that ended with this code; 128 + n is a kill by signal n.

    Other codes than those of :class:`ExitCode` are crashes, after which a restart may help.
    """
    match exit_code:
        case ExitCode.OK:
            return Advice.DONE
        case ExitCode.INTERRUPTED | ExitCode.TERMINATED:
            return Advice.ELSEWHERE
        case ExitCode.PEER_LOST:
            return Advice.YES
        case _:
            return Advice.NO if exit_code in set(ExitCode) else Advice.YES


@dataclass(frozen=True, slots=True)
class Limits:
    """A limit of ``max_restarts`` restarts within any ``within_s`` seconds."""

    max_restarts: int
    within_s: float


USUAL_LIMITS = Limits(10, 600.0)


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of one run of a process. Times are of the monotonic clock.

    ``returncode`` is as in `subprocess`: -n means that signal n killed it.
    """

    returncode: int
    started_at: float
    ended_at: float

    @property
    def lasted_s(self) -> float:
        return self.ended_at - self.started_at

    @property
    def is_fault(self) -> bool:
        """Whether compiled code crashed it; these signals are not used to kill a process."""
        return -self.returncode in FAULTS

    @property
    def exit_code(self) -> int:
        """The exit code to pass on: 128 + n for signal n."""
        return self.returncode if self.returncode >= 0 else 128 - self.returncode

    def __str__(self) -> str:
        after = f"after {self.lasted_s:.1f} s"
        if self.returncode < 0:
            number = -self.returncode
            names = {each.value: f" ({each.name})" for each in signal.Signals}
            return f"was killed by signal {number}{names.get(number, '')} {after}"
        known = {each.value: f" ({each.name})" for each in ExitCode if each != ExitCode.OK}
        return f"ended with exit code {self.returncode}{known.get(self.returncode, '')} {after}"


@dataclass(frozen=True, slots=True)
class Restart:
    """Restart it in ``delay_s`` seconds; after that ``left`` restarts remain.

    ``regained_s``: seconds until the oldest restart no longer counts.
    """

    delay_s: float
    left: int
    regained_s: float = math.inf


@dataclass(frozen=True, slots=True)
class End:
    """Do not restart it; ``reason`` is "" if it ended as wanted.

    ``exit_code``: the one to pass on; 0: that of the last run. ``used_up``: no restart is left.
    """

    reason: str = ""
    exit_code: int = 0
    used_up: bool = False


def decide(endings: Sequence[Ending], limits: Limits, jitter: float) -> Restart | End:
    """Return the decision after these endings, the oldest first.

    ``jitter`` from 0 to 1 shortens the delay by up to a half, so that processes that died together
    do not all restart at the same moment.
    """
    last = endings[-1]
    match advice(last.exit_code):
        case Advice.DONE | Advice.ELSEWHERE:
            return End()
        case Advice.NO:
            return End("a restart would not help")
    recent = [each for each in endings[:-1] if last.ended_at - each.ended_at < limits.within_s]
    if last.is_fault and sum(each.is_fault for each in recent) + 1 >= MAX_FAULTS:
        return End(
            f"compiled code has crashed it {MAX_FAULTS} times, see the stack in its log; a step "
            "may write to parameters, which are read-only",
            ExitCode.USAGE,
        )
    if len(recent) >= limits.max_restarts:
        limit = f"{counted(limits.max_restarts, 'restart')} within {limits.within_s:g} s"
        flags = "--max-restarts or ZMQTRAIN_MAX_RESTARTS"
        return End(f"its limit of {limit} ({flags}) is used up", used_up=True)
    if _losses_in_a_row(endings, limits) > limits.max_restarts:
        return End(f"its peer was lost {limits.max_restarts + 1} times in a row")
    regained_s = limits.within_s - (last.ended_at - [*recent, last][0].ended_at)
    return Restart(_delay_s(endings, jitter), limits.max_restarts - len(recent) - 1, regained_s)


def _losses_in_a_row(endings: Sequence[Ending], limits: Limits) -> int:
    """Count the last runs that ended because a peer was lost.

    Each may take so long that ``max_restarts`` within ``within_s`` is never reached.
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
