"""The whole update of a shard by one accepted gradient, in one pass over memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import inf
from typing import Any, TypeAlias

import numpy as np

from zmqtrain.compute.arrays import Flat, block_size, blocks
from zmqtrain.errors import ConfigError
from zmqtrain.optim import kernels
from zmqtrain.optim.base import Rule, Slot
from zmqtrain.optim.checks import check_decay, check_non_negative, check_positive
from zmqtrain.optim.formula import LayerRule, Numbers, at, squares_of
from zmqtrain.optim.groups import Groups, Pattern, check_groups, fits, with_options
from zmqtrain.optim.layers import Squares, factors_of
from zmqtrain.optim.mean import Mean, add_up
from zmqtrain.optim.norm import clip_scale, square_of
from zmqtrain.optim.outer import RESIDUAL, Outer
from zmqtrain.optim.redo import Redo
from zmqtrain.optim.runs import Absences, Run, Runs, cut, joined_runs, own_count

AVERAGE = "average"
"""The slot of the parameters' moving average."""

InitialSlots: TypeAlias = Mapping[str, Mapping[str, float | None]]
"""For each slot, by the names of the variables that have it, its initial value: see Slot."""


@dataclass(frozen=True, slots=True)
class Update:
    """A rule with L2 regularisation before it and a moving average after it; itself a rule.

    With w the parameters, g the gradient, and a the slot "average", w's initial value at first:

        g = g + l2 * w                  the loss l2 * sum(w^2) / 2 of tf.contrib's l2_regularizer;
                                        Keras's regularizers.l2(l) is l2 = 2 * l
        the rule
        a += (1 - d) * (w - a)          with d = min(moving_average, (1 + k) / (10 + k))

    With ``clip_norm`` the mean is first scaled to this global norm at most: see norm.py. With
    ``clip_value`` its elements are limited to the range from -clip_value to clip_value.

    k is the number of updates including this one: tf.train.ExponentialMovingAverage with
    ``num_updates=global_step``, which TensorFlow's models run after the update. Without ``ramp``, d
    is ``moving_average`` and 0 at the first update, as in torch's AveragedModel. Without
    ``moving_average`` there is no such slot. Both act on every parameter, biases included.

    Non-finite values cause no warning here: gradients are checked when they arrive.

    ``outer`` takes over results of local steps, beside all this: see outer.py.

    ``groups`` has, by patterns of variables' names such as "*.bias", or tuples of them, other
    options: ``optimizer``, another rule; those of the rule; or ``l2``. The first that fits a name
    counts; group 0 is of those without one. A group's own learning rate, or that of its own
    optimizer, stays when callbacks set another one.

    A rule that is a formula is compiled to one pass over memory, with the same result.
    ``fused=False`` uses NumPy on a CPU. It does not change the update, so its ``repr`` lacks it.

    ``exact``: the update has the same bits on every CPU, as copies need. Without it, those of Muon
    depend on the CPU, and are computed in less than half the time.
    """

    rule: Rule
    l2: float = 0.0
    moving_average: float | None = None
    clip_norm: float | None = field(default=None, kw_only=True)
    clip_value: float | None = field(default=None, kw_only=True)
    groups: Groups = field(default_factory=dict, kw_only=True, hash=False)
    ramp: bool = field(default=True, kw_only=True)
    outer: Outer = field(default=Outer(), kw_only=True)
    fused: bool = field(default=True, kw_only=True, compare=False)
    exact: bool = field(default=False, kw_only=True, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.rule, type) or not isinstance(self.rule, Rule):
            raise ConfigError(
                f"Update: rule is {self.rule!r}; expected an update rule such as SGD(0.01); "
                "correct optimizer in the job"
            )
        if isinstance(self.rule, Update) and (self.rule.is_layered or self.rule.clip_norm):
            raise ConfigError(
                f"Update: {self.rule!r} needs whole variables and cannot be wrapped twice; "
                "give l2, clip_norm and moving_average in one Update"
            )
        check_non_negative(self, "l2")
        for name in ("clip_norm", "clip_value"):
            if getattr(self, name) is not None:
                check_positive(self, name)
        self.by_group()
        if self.moving_average is None:
            return
        check_decay(self, "moving_average")
        if any(slot.name == AVERAGE for slot in self.rule.slots):
            raise ConfigError(
                f"Update: {self.rule!r} already has a slot {AVERAGE!r}, in which moving_average "
                "would be kept; leave moving_average out or rename the rule's slot"
            )

    def __repr__(self) -> str:
        more = {
            "clip_norm": self.clip_norm,
            "clip_value": self.clip_value,
            "groups": self.groups,
            "outer": self.outer.rule,
        }
        others = "".join(f", {name}={value!r}" for name, value in more.items() if value)
        others += "" if self.ramp else ", ramp=False"
        return (
            f"Update(rule={self.rule!r}, l2={self.l2!r}, moving_average={self.moving_average!r}"
            f"{others})"
        )

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The slots of all groups, each once, and those of ``outer``."""
        residual = (Slot(RESIDUAL, 0.0),) if self.outer.keeps_residual else ()
        return (*self.own_slots, *self.outer.slots, *residual)

    @property
    def own_slots(self) -> tuple[Slot, ...]:
        """The slots of all groups, each once; a group may begin a slot with another value."""
        found = {slot.name: slot for each in self.by_group() for slot in each.rule.slots}
        own = () if self.moving_average is None else (Slot(AVERAGE, None),)
        return (*found.values(), *own)

    def initial_slots(self, names: Iterable[str]) -> InitialSlots:
        """Return which of these variables have each slot, and with what it begins: see Slot."""
        found: dict[str, dict[str, float | None]] = {slot.name: {} for slot in self.slots}
        own_slots = [each.slots for each in self.by_group()]
        for name in names:
            for slot in own_slots[self.group_of(name)]:
                found[slot.name][name] = slot.initial
        return found

    def update(
        self, parameters: Flat, gradient: Flat, slots: Mapping[str, Flat], step: int
    ) -> None:
        clip = 1.0
        if self.clip_norm is not None:
            clip = clip_scale(float(square_of(gradient, self.clip_norm)), self.clip_norm)
        self.bind(parameters, slots).apply(Mean([gradient], clip=clip), step)

    @property
    def is_layered(self) -> bool:
        """Whether the update of an element depends on norms of its variable."""
        return any(isinstance(each.rule, LayerRule) for each in self.by_group())

    def whole(self, names: Iterable[str]) -> frozenset[str]:
        """Return which of these variables must not be cut, for their rule looks at all of it."""
        rules = [each.rule for each in self.by_group()]
        return frozenset(n for n in names if isinstance(rules[self.group_of(n)], LayerRule))

    def group_of(self, name: str) -> int:
        """Return the number of the group of a variable."""
        fitting = (n for n, p in enumerate(self.groups, start=1) if fits(name, p))
        return next(fitting, 0)

    def by_group(self) -> list[Update]:
        """Return the update of each group's variables.

        Raises:
            ConfigError: ``groups`` has an option that its rule has not, or of a wrong value.
        """
        if not self.groups:
            return [self]
        check_groups(self.groups)
        alone = replace(self, groups={})
        return [alone, *(alone._with(pattern, each) for pattern, each in self.groups.items())]

    def _with(self, pattern: Pattern, options: Mapping[str, Any]) -> Update:
        rule: Any = replace(self, rule=options.get("optimizer", self.rule)).rule
        rule, has_own_l2 = with_options(rule, pattern, options)
        return replace(self, rule=rule, l2=self.l2 if has_own_l2 else options.get("l2", self.l2))

    def bind(
        self,
        parameters: Flat,
        slots: Mapping[str, Flat],
        redo: Redo | None = None,
        runs: Runs | None = None,
    ) -> BoundUpdate:
        """Bind this update to memory to which it is applied many times.

        ``redo``: for ``parameters`` and every slot, if the update must be crash-safe. ``runs``:
        cover the memory, in order; None: all is one variable, in no group.
        """
        return BoundUpdate(self, parameters, slots, redo, runs)

    def share(self, updates: int) -> np.float32 | None:
        """Return 1 - d of the average after this many updates."""
        if self.moving_average is None:
            return None
        limit = (1 + updates) / (10 + updates) if self.ramp else updates - 1
        return np.float32(1 - min(self.moving_average, limit))


class BoundUpdate:
    """An update and the memory of one shard; lookups and allocations are made once."""

    def __init__(
        self,
        update: Update,
        parameters: Flat,
        slots: Mapping[str, Flat],
        redo: Redo | None = None,
        runs: Runs | None = None,
    ) -> None:
        self._update = update
        self._groups = [_operands(each, parameters, slots, redo) for each in update.by_group()]
        self._operands = self._groups[0]
        self._numbers = [kernels.numbers_of(operands.rule) for operands in self._groups]
        self._has_factor = [isinstance(operands.rule, LayerRule) for operands in self._groups]
        self._kernels = [kernels.bind(operands, compiled=update.fused) for operands in self._groups]
        whole = [Run(slice(0, len(parameters)))]
        self._runs = whole if runs is None else runs
        self._joined = joined_runs(self._runs) or whole
        self._limits = update.clip_norm is not None or update.clip_value is not None
        groups = self._groups  # not self, whose memory is freed at once
        self._of_whole = cache(lambda group: kernels.reference.FormulaKernel(groups[group]))

    def numbers(self, step: int) -> list[Numbers]:
        """Return the hyperparameters of update ``step`` for each group; () without a formula.

        Raises:
            ConfigError: the rule, or that of a group, cannot make this update.
        """
        return [call(step) for call in self._numbers]

    def apply(
        self,
        mean: Mean,
        step: int,
        factors: Flat | None = None,
        numbers: Sequence[Numbers] | None = None,
        absences: Absences | None = None,
        directions: Flat | None = None,
    ) -> None:
        """Apply a mean of gradients as update ``step``.

        The gradients have shape (n,) and are only read; they are added up block by block, in one
        pass over memory. An interrupted crash-safe update goes on from its last block.
        ``factors``: one for each variable, for a layered update; None: all is one variable.
        ``directions``: arrays of shape (n,), for runs that have a shape.
        ``numbers``: result of :meth:`numbers` for this step, if it is there. ``absences``: None
        if all variables have a gradient, and always had.

        Raises:
            ConfigError: the rule cannot make this update; nothing was changed.
        """
        if numbers is None:
            numbers = self.numbers(step)
        if factors is None and any(self._has_factor):
            size = len(self._operands.parameters)
            squares = [self.squares(run, mean, step) for run in self._runs]
            factors = factors_of([self._operands.rule], squares, [size], step)
        share = self._update.share(step + 1) if self._operands.average else None
        scale = self._scale(mean)
        start = 0 if self._operands.redo is None else self._operands.redo.done
        runs = self._joined if factors is None and absences is None else self._runs
        if self._is_plain(mean) and runs is self._joined and len(runs) == 1:
            # What follows would do the same; for a small model it takes as long as the kernel.
            own, group = mean.gradients[0][start:], runs[0].group
            self._kernels[group](
                own, start, kernels.Scalars(step, numbers[group], scale, share, None)
            )
            return
        calls: dict[tuple[int, int], tuple[kernels.Kernel, int, Numbers]] = {}
        for block, gradient in self._sums(mean, start):
            for where, run in cut(block, runs):
                if absences is not None and absences.absent[run.variable]:
                    if self._operands.redo is not None:
                        self._operands.redo.skip(where.stop)
                    continue
                kernel, count, given = self._kernels[run.group], step, numbers[run.group]
                if absences is not None and absences.missed[run.variable]:
                    key = run.group, absences.missed[run.variable]
                    calls[key] = calls.get(key) or self._call_of(*key, step)
                    kernel, count, given = calls[key]
                own = gradient[where.start - block.start : where.stop - block.start]
                own_factors = factors if self._has_factor[run.group] else None
                factor = None if own_factors is None else own_factors[run.variable]
                direction = None if run.shape is None or directions is None else directions[where]
                scalars = kernels.Scalars(count, given, scale, share, factor, direction)
                (kernel if direction is None else self._of_whole(run.group))(
                    own, where.start, scalars
                )

    def call(self, mean: Mean, step: int, numbers: Sequence[Numbers]) -> kernels.Call | None:
        """Return what :meth:`apply` calls, with ``numbers`` of this step, to update all memory.

        None: it is not just one call of compiled code on the mean's only gradient.
        """
        if len(self._joined) > 1 or any(self._has_factor) or not self._is_plain(mean):
            return None
        group = self._joined[0].group
        share = self._update.share(step + 1) if self._operands.average else None
        scalars = kernels.Scalars(step, numbers[group], self._scale(mean), share, None)
        return kernels.call_of(self._kernels[group], scalars)

    def resume(self) -> None:
        """Finish the block at which a process was killed: its group's slots were ready."""
        if (redo := self._operands.redo) is not None:
            _, run = next(cut(slice(redo.done, redo.done), self._joined))
            (self._groups[run.group].redo or redo).resume()

    def square(self, mean: Mean) -> int:
        """Return the sum of squares of a mean, in units: see norm.py."""
        limit = self._update.clip_norm or 1.0
        return sum(square_of(block, limit) for _, block in self._sums(mean, 0))

    def gradient(self, mean: Mean) -> Flat:
        """Return a mean as the rule gets it, of shape (n,), without L2 regularisation."""
        found, scale = np.empty_like(self._operands.parameters), self._scale(mean)
        for block, total in self._sums(mean, 0):
            np.multiply(total, scale, out=found[block])
        return found

    def squares(self, run: Run, mean: Mean, step: int, absences: Absences | None = None) -> Squares:
        """Return the variable of a run whose rule is a LayerRule, and the run's sums of squares.

        The other arguments are those of :meth:`apply`, which comes after this. Threads may call it
        side by side.
        """
        where, variable, group, _ = run
        own, scale = self._groups[group], self._scale(mean)
        rule, count = own_count(own.rule, step, absences.missed[variable] if absences else 0)
        here = at(own.arrays[:-1], where)
        of_parameters = of_direction = 0.0
        for block, gradient in self._sums(mean.at(where), 0):
            w, d = squares_of(rule, at(here, block), gradient, count, scale, own.l2)
            of_parameters, of_direction = of_parameters + w, of_direction + d
        return variable, of_parameters, of_direction

    def _sums(self, mean: Mean, start: int) -> Iterator[tuple[slice, Flat]]:
        """Yield the weighted sum of the gradients from element ``start`` on, block by block.

        If the update limits the mean, this is the mean, with its elements limited.
        A single gradient is one block. An empty one is a block, too, since the rule may raise.
        """
        gradients, divisor, weights, _ = mean
        first, size = gradients[0], len(gradients[0])
        if self._is_plain(mean) or not size:
            yield slice(start, size), first[start:] if start else first
            return
        length = min(len(self._operands.parameters), block_size(first))
        scratch = np.empty_like(first, shape=length)
        weights = weights or [1.0] * len(gradients)
        factor, limit = 1 / divisor if self._limits else 1, self._update.clip_value or inf
        for block in blocks(size, length, start):
            total = scratch[: block.stop - block.start]
            terms = [gradient[block] for gradient in gradients]
            add_up(terms, weights, total, factor=factor, limit=limit)
            yield block, total

    def _scale(self, mean: Mean) -> np.float32:
        """Return the factor of what :meth:`_sums` yields."""
        return np.float32(mean.clip if self._limits else 1 / mean.divisor)

    def _is_plain(self, mean: Mean) -> bool:
        """Return whether the only gradient is what :meth:`_sums` yields, as it is."""
        is_alone = len(mean.gradients) == 1 and mean.weights is None
        is_mean = mean.divisor == 1 and self._update.clip_value is None
        return is_alone and (is_mean or not self._limits)

    def _call_of(self, group: int, missed: int, step: int) -> tuple[kernels.Kernel, int, Numbers]:
        """Return kernel, step and hyperparameters for variables that have missed updates."""
        operands = self._groups[group]
        rule, count = own_count(operands.rule, step, missed)
        kernel = self._kernels[group]
        if not kernels.has_formula(rule):
            kernel = kernels.bind(replace(operands, rule=rule), compiled=False)
        return kernel, count, kernels.numbers_of(rule)(count)


def _operands(
    update: Update, parameters: Flat, slots: Mapping[str, Flat], redo: Redo | None
) -> kernels.Operands:
    """Return what the update of a group changes; ``slots``, ``redo``: those of all groups."""
    own = {slot.name: slots[slot.name] for slot in update.own_slots}
    return kernels.Operands(
        update.rule,
        parameters,
        own,
        None if update.moving_average is None else AVERAGE,
        np.float32(update.l2) if update.l2 else None,
        redo and redo.of([0, *(1 + list(slots).index(name) for name in own)]),
    )
