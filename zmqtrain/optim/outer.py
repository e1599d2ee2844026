"""The outer update of local steps: it applies the results of workers to a shard."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from zmqtrain.errors import ConfigError
from zmqtrain.optim.base import Slot
from zmqtrain.optim.formula import Formula, FormulaRule, Numbers, rounded
from zmqtrain.optim.rules import SGD, Momentum
from zmqtrain.optim.schedules import momentum_at, rate_at

PREFIX = "outer_"
"""Begins the names of slots, since the optimizer may have slots of the same names."""

RESIDUAL = PREFIX + "residual"
"""The slot of what compressed answers to workers have left out so far: see server/differences.py.
The rule neither reads nor changes it."""

OPENS, CLOSES = 1, 2
"""Bits of ``cycle``: the result is the first of its cycle of momentum, and the last one."""


@dataclass(frozen=True)
class Outer(FormulaRule):
    """The outer rule of local steps, applied to the weighted mean of the workers' results.

    Results are parameters. Without a ``rule`` the mean of them is the new value, so that of one
    worker is taken over bit for bit. With one, the mean's distance from the current value w is its
    gradient, w - mean, as in DiLoCo (Douillard et al., arXiv:2311.08105). ``of_differences``:
    results are what was added to w instead, which loses less when it is compressed.
    ``keeps_residual``: there is a slot :data:`RESIDUAL`.

    Without rounds, ``among`` is the number of workers, and the difference d of one of them is
    applied when it arrives: w += d / among without a rule. With a rule, g = -d / among is its
    gradient; a momentum is delayed (algorithm 3 with c = 0 of Liu et al., "Asynchronous Local-SGD
    Training for Language Modeling", arXiv:2401.09135). With a the slot "momentum":

        a = momentum * a + g            a += g   unless ``cycle`` OPENS
        w -= lr * (g + momentum * a)    w -= lr * g   unless it CLOSES

    One cycle has a result of each worker, so it moves w as Nesterov's rule does in a round.
    """

    rule: SGD | Momentum | None = None
    of_differences: bool = False
    keeps_residual: bool = False
    among: int = 0
    cycle: int = OPENS | CLOSES

    @property
    def slots(self) -> tuple[Slot, ...]:
        own = () if self.rule is None else self.rule.slots
        return tuple(Slot(PREFIX + slot.name, slot.initial) for slot in own)

    def hyperparameters(self, step: int) -> Numbers:
        rule = self.rule
        if not self.among:
            return () if rule is None else rule.hyperparameters(step)
        given = rounded(1 / self.among, 1.0 if rule is None else rate_at(rule.learning_rate, step))
        if not isinstance(rule, Momentum):
            return given
        momentum = momentum_at(rule.momentum, step)
        opens, closes = self.cycle & OPENS, self.cycle & CLOSES
        factors = rounded(momentum if opens else 1.0, momentum if closes else 0.0)
        return *given, *factors, rule.scaled_velocity

    @property
    def formula(self) -> Formula:  # type: ignore[override]  # others have one for all of a class
        if self.among:
            return _delayed if isinstance(self.rule, Momentum) else _at_arrival
        return _formula(None if self.rule is None else self.rule.formula, self.of_differences)


@cache
def _formula(rule: Formula | None, of_differences: bool) -> Formula:
    def formula(w: Any, result: Any, *others: Any) -> tuple[Any, ...]:
        if rule is None:
            return (w + result if of_differences else result,)
        return rule(w, -result if of_differences else w - result, *others)

    return formula


def _at_arrival(w: Any, difference: Any, share: Any, rate: Any) -> tuple[Any, ...]:
    return (w + rate * (share * difference),)


def _delayed(w: Any, difference: Any, a: Any, *numbers: Any) -> tuple[Any, ...]:
    share, rate, decay, momentum, scaled_velocity = numbers
    moved = share * difference
    if scaled_velocity:
        a = decay * a + rate * moved
        return w + rate * moved + momentum * a, a
    a = decay * a - moved
    return w - rate * (momentum * a - moved), a


def check_outer(rule: object) -> None:
    """
    Raises:
        ConfigError: it cannot be the rule of an :class:`Outer`.
    """
    if rule is None or isinstance(rule, SGD):
        return
    if not isinstance(rule, Momentum):
        raise ConfigError(
            "expected SGD or Momentum of zmqtrain.optim, such as Momentum(0.7, 0.9, nesterov=True),"
            " or None for the mean of the workers' parameters"
        )
    if rule.dampening:
        raise ConfigError("expected no dampening, which counts the steps of the job")
