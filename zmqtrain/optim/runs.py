"""The variables in the memory that an update changes: their runs, and those without a gradient.

The latter keep their values, slots and averages. As in torch.optim, corrections of moments count a
variable's updates, while rates and momenta follow the steps of the job.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

from zmqtrain.optim.schedules import has_rate, momentum_at, rate_at

_SCHEDULED: dict[str, Callable[..., float]] = {
    "learning_rate": rate_at,
    "momentum": momentum_at,
    "beta1": momentum_at,
}


class Run(NamedTuple):
    """Elements of one variable, which may have several runs; ``group`` is that of its options.

    ``shape``: shape of a variable whose step a MatrixRule computes as a whole, else None.
    """

    where: slice
    variable: int = 0
    group: int = 0
    shape: tuple[int, ...] | None = None


Runs: TypeAlias = Sequence[Run]


def cut(block: slice, runs: Runs) -> Iterator[tuple[slice, Run]]:
    """Cut a block where a run begins; yield (elements, run)."""
    if len(runs) == 1:
        yield block, runs[0]
        return
    behind = bisect_right(runs, block.start, key=lambda run: run.where.start)
    for run in runs[max(behind - 1, 0) :]:
        if run.where.start >= max(block.stop, block.start + 1):
            return
        yield slice(max(run.where.start, block.start), min(run.where.stop, block.stop)), run


def joined_runs(runs: Runs) -> list[Run]:
    """Return runs that go on as long as the group is the same."""
    joined: list[Run] = []
    for run in runs:
        if joined and joined[-1].group == run.group:
            start = joined.pop().where.start
            run = run._replace(where=slice(start, run.where.stop))
        joined.append(run)
    return joined


class Absences(NamedTuple):
    """Whether each variable has no gradient in an update, and in how many before it had none."""

    absent: Sequence[bool]
    missed: Sequence[int]


def own_count(rule: Any, step: int, missed: int) -> tuple[Any, int]:
    """Return the rule with rate and momentum of this step, and a variable's number of updates."""
    if missed and has_rate(rule):
        names = [name for name in _SCHEDULED if callable(getattr(rule, name, None))]
        rule = replace(
            rule, **{name: _SCHEDULED[name](getattr(rule, name), step) for name in names}
        )
    return rule, step - missed
