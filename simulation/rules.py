"""Rules that decide what happens to single messages, by their type, their way and their number.

Weather is drawn at random. A rule is exact: ``drop(Push, 3, sender="worker 0", receiver="ps 1")``
loses the third push that worker 0 sends to ps 1. A message that is sent again counts again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any, Literal

from simulation.faults import Fault


def anything(message: Any) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Rule:
    """The fate of some messages.

    ``kind``: class of the message; ``object``: any. ``numbers``: numbers of the matching messages,
    counted from 1; (): all. ``sender`` and ``receiver``: a task ("ps 1"), a role ("ps"), or "" for
    all. ``where``: a predicate of the message. ``from_s`` and ``until_s``: virtual times between
    which the rule holds. ``delay_s``: virtual seconds by which a message, and those that follow it
    on its connection, arrive later. ``fault``: the fault just before the message arrives.
    """

    fate: Literal["drop", "refuse", "delay", "duplicate", "fault"]
    kind: type
    numbers: tuple[int, ...] = ()
    sender: str = ""
    receiver: str = ""
    where: Callable[[Any], bool] = anything
    from_s: float = 0.0
    until_s: float = inf
    delay_s: float = 0.0
    fault: Fault | None = None

    def decides(self, number: int) -> bool:
        """Say whether the rule holds for this one of the messages that it matches."""
        return not self.numbers or number in self.numbers

    def matches(self, message: Any, sender: str, receiver: str, at_s: float) -> bool:
        return (
            isinstance(message, self.kind)
            and self.from_s <= at_s < self.until_s
            and _is(sender, self.sender)
            and _is(receiver, self.receiver)
            and self.where(message)
        )


def drop(kind: type, *numbers: int, **which: Any) -> Rule:
    """Return the rule that loses messages: those of these numbers; all, if none is given."""
    return Rule("drop", kind, numbers, **which)


def refuse(kind: type, *numbers: int, **which: Any) -> Rule:
    """Return the rule that answers requests to a ps as one would that does not know the sender."""
    return Rule("refuse", kind, numbers, **which)


def before(kind: type, *numbers: int, fault: Fault, **which: Any) -> Rule:
    """Return the rule that has something go wrong just before messages arrive."""
    return Rule("fault", kind, numbers, fault=fault, **which)


def delay(kind: type, *numbers: int, by_s: float, **which: Any) -> Rule:
    """Return the rule that delivers messages later."""
    return Rule("delay", kind, numbers, delay_s=by_s, **which)


def duplicate(kind: type, *numbers: int, **which: Any) -> Rule:
    """Return the rule that delivers messages twice."""
    return Rule("duplicate", kind, numbers, **which)


def _is(name: str, wanted: str) -> bool:
    return not wanted or name == wanted or name.partition(" ")[0] == wanted
