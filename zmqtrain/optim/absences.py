"""Variables without a gradient in an update: they keep their values, slots and averages.

As in torch.optim, where ``grad`` is None then: a rule counts the updates of each variable, for
Adam's corrections of its moments, and the learning rate follows the steps of the job.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from zmqtrain.optim.schedules import has_rate, rate_at


class Absences(NamedTuple):
    """``absent``: whether each variable has no gradient in an update. ``missed``: number of
    updates before in which it had none."""

    absent: Sequence[bool]
    missed: Sequence[int]


def own_count(rule: Any, step: int, missed: int) -> tuple[Any, int]:
    """Return the rule, with the learning rate of ``step``, and a variable's own updates before it.

    Raises:
        ConfigError: there is no learning rate at this step.
    """
    if missed and has_rate(rule):
        rule = replace(rule, learning_rate=rate_at(rule.learning_rate, step))
    return rule, step - missed
