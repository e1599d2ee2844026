"""Variables without a gradient in an update keep their values, slots and averages.

As in torch.optim, corrections of moments count a variable's updates, rates the steps of the job.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from zmqtrain.optim.schedules import has_rate, rate_at


class Absences(NamedTuple):
    """Whether each variable has no gradient in an update, and in how many before it had none."""

    absent: Sequence[bool]
    missed: Sequence[int]


def own_count(rule: Any, step: int, missed: int) -> tuple[Any, int]:
    """Return the rule with the rate of this step, and how many updates a variable has had."""
    if missed and has_rate(rule):
        rule = replace(rule, learning_rate=rate_at(rule.learning_rate, step))
    return rule, step - missed
