"""How a shard takes over the results of workers that have trained by themselves for a while."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from zmqtrain.errors import ConfigError
from zmqtrain.optim.base import Slot
from zmqtrain.optim.formula import Formula, FormulaRule, Numbers
from zmqtrain.optim.rules import SGD, Momentum

PREFIX = "outer_"
"""Begins the names of slots, since the optimizer may have slots of the same names."""

RESIDUAL = PREFIX + "residual"
"""The slot of what compressed answers to workers have left out so far: see server/differences.py.
The rule neither reads nor changes it."""


@dataclass(frozen=True)
class Outer(FormulaRule):
    """The outer rule of local steps, applied to the weighted mean of the workers' results.

    Results are parameters. Without a ``rule`` the mean of them is the new value, so that of one
    worker is taken over bit for bit. With one, the mean's distance from the current value w is its
    gradient, w - mean, as in DiLoCo (Douillard et al., arXiv:2311.08105). ``of_differences``:
    results are what was added to w instead, which loses less when it is compressed.
    ``keeps_residual``: there is a slot :data:`RESIDUAL`.
    """

    rule: SGD | Momentum | None = None
    of_differences: bool = False
    keeps_residual: bool = False

    @property
    def slots(self) -> tuple[Slot, ...]:
        own = () if self.rule is None else self.rule.slots
        return tuple(Slot(PREFIX + slot.name, slot.initial) for slot in own)

    def hyperparameters(self, step: int) -> Numbers:
        return () if self.rule is None else self.rule.hyperparameters(step)

    @property
    def formula(self) -> Formula:  # type: ignore[override]  # others have one for all of a class
        return _formula(None if self.rule is None else self.rule.formula, self.of_differences)


@cache
def _formula(rule: Formula | None, of_differences: bool) -> Formula:
    def formula(w: Any, result: Any, *others: Any) -> tuple[Any, ...]:
        if rule is None:
            return (w + result if of_differences else result,)
        return rule(w, -result if of_differences else w - result, *others)

    return formula


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
