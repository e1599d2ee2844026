"""The dense variables of a shard: one flat block of memory, changed by one update rule.

The block is cut into parts that threads change side by side. The segment's layout alone says where
they begin, and the arithmetic on an element does not depend on its place. So a change that was
begun by another number of threads is finished bit for bit: each part goes on block by block, as
optim/redo.py says. What a rule takes from whole variables (the factors of a LayerRule) is written
into the segment before the first element is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zmqtrain.compute.arrays import Flat
from zmqtrain.compute.device import Device
from zmqtrain.compute.threads import ThreadTeam
from zmqtrain.optim import AVERAGE, BoundUpdate, Slot, Update
from zmqtrain.optim.absences import Absences
from zmqtrain.optim.formula import Numbers
from zmqtrain.optim.mean import Assign, Mean
from zmqtrain.optim.outer import RESIDUAL
from zmqtrain.optim.pipeline import Run, Runs, Squares, factors_of, rules_of
from zmqtrain.optim.redo import Redo
from zmqtrain.optim.sums import add_up
from zmqtrain.store.changes import ACCUMULATE, SETTLE, UPDATE, Change
from zmqtrain.store.checkpoint import begin_slots, read_shard, tensors_of
from zmqtrain.store.holdings.device_arrays import DeviceArrays
from zmqtrain.store.layout import ShardLayout
from zmqtrain.store.manifest import Manifest
from zmqtrain.store.segment import Segment
from zmqtrain.store.segment_layout import MISSED, RESTED, VERSION, PartLayout, parts_of


class Dense:
    """All variables of a shard that every gradient has in full. It is a Holding.

    ``safe``: a change survives a killed process; then there is no ``device``.
    """

    def __init__(
        self,
        layout: ShardLayout,
        update: Update,
        segment: Segment,
        *,
        safe: bool,
        threads: int | None,
        device: Device | None,
    ) -> None:
        self._layout, self._segment, self._safe = layout, segment, safe
        self._arrays = DeviceArrays(segment, device)
        of = segment.layout
        # A kernel has all of a device to itself.
        self._cut = (
            of.parts
            if device is None
            else parts_of(of.size, of.state, lambda size: [slice(0, size)])
        )
        self._team = ThreadTeam(threads)
        self._runs, self._sizes = runs_of(layout, update)
        self._initial = update.initial_slots(layout.numbers)
        self.use(update)

    def use(self, update: Update) -> None:
        """Update by this rule from now on; its slots are those of the one before."""
        self._update = update
        self._is_layered = update.is_layered
        self._parts = [self._part(number, part) for number, part in enumerate(self._cut)]
        self._begun: tuple[Change, list[Numbers]] | None = None

    def check(self, step: int) -> None:
        """Check that the rule can make update ``step``.

        Raises:
            ConfigError: it cannot.
        """
        self._parts[0].bound.numbers(step)

    def begin(self, change: Change) -> None:
        if change.kind == UPDATE:
            bound = self._parts[0].bound_for(change)
            self._begun = change, bound.numbers(change.step)
            if self._is_layered and not change.local_steps:
                self._measure(change)
        self.begin_parts(range(len(self._parts)))

    def update(self, change: Change) -> None:
        mean, step = self._mean(change), change.step
        is_layered = self._is_layered and not change.local_steps
        factors = self._segment.factors if is_layered else None
        given, absences = (step, factors, self._numbers(change)), self._absences_in(change)
        calls = [
            partial(part.bound_for(change).apply, part.own(mean, change.clip), *given, absences)
            if part.is_trained
            else partial(part.bound.apply, part.own(mean), step)
            for part in self._parts
        ]
        self._team.run(calls)
        self._arrays.publish()

    def add(self, change: Change) -> None:
        mean, begin = self._mean(change), not change.with_sum
        self._team.run([partial(part.add, part.own(mean), begin=begin) for part in self._parts])
        np.minimum.reduce(self._absent(change), out=self._segment.absent_of_sum)

    def begin_settling(self) -> None:
        """Note that no parameter is settled."""
        self.begin_parts(range(len(self._parts)))

    def settle(self, target: Flat) -> None:
        """Move the trained parameters to ``target``: see :meth:`Shard.settle`."""
        self._team.run([partial(part.settle, target) for part in self._parts if part.is_trained])

    def repair(self, change: Change) -> None:
        for part in self._parts:
            if change.kind == SETTLE:
                part.resume_settling()
            else:
                part.resume(of_sum=change.kind == ACCUMULATE, bound=part.bound_for(change))

    def carry_missed(self, before: int, version: int) -> None:
        """Note that no variable has missed an update between these versions."""
        if before % 2 != version % 2:
            self._segment.missed[version % 2] = self._segment.missed[before % 2]

    def initialize(
        self,
        parameters: Flat,
        slots: Mapping[str, Flat] | None = None,
        missed: Mapping[str, int] | None = None,
    ) -> None:
        """Begin with these parameters and slots (None: their initial values), copied."""
        counts = [(missed or {}).get(name, 0) for name in self._layout.numbers]
        self._segment.missed[:] = counts
        self._segment.words[MISSED] = any(counts)
        np.copyto(self._segment.parameters, parameters)
        if slots is None:
            begin_slots(self._layout, parameters, self._initial, self._segment.slots)
        for name, value in (slots or {}).items():
            np.copyto(self._segment.slots[name], value)
        self.load()

    def tensors(self, layout: ShardLayout) -> dict[str, NDArray[Any]]:
        return tensors_of(layout, self._segment.parameters, self.slots, self._initial)

    def read(self, path: Path, manifest: Manifest) -> Callable[[], None]:
        found = read_shard(path, manifest, self._layout, self._initial)
        return partial(self.initialize, *found)

    def load(self) -> None:
        self._arrays.load()

    @property
    def slots(self) -> dict[str, Flat]:
        """The current slots of the update rule; no change is under way."""
        self._arrays.publish_slots()
        return self._segment.slots

    @property
    def missed(self) -> dict[str, int]:
        """Number of steps in which the shard updated a variable by no gradient, unless 0."""
        words = self._segment.words
        counts = (self._segment.missed[words[VERSION] % 2] + words[RESTED]).tolist()
        return {name: counts[n] for name, n in self._layout.numbers.items() if counts[n]}

    def begin_parts(self, numbers: Iterable[int]) -> None:
        """Note that nothing of the next change of these parts is made."""
        for number in numbers:
            self._parts[number].begin()

    def update_parts(self, numbers: Iterable[int], change: Change) -> None:
        """Make, or finish, an update of these parts, which is no noted change.

        The rule is not layered, and :meth:`check` has passed.
        """
        mean, absences = self._mean(change), self._absences(self._absent(change), change.step)
        for number in numbers:
            part = self._parts[number]
            part.resume(of_sum=False, bound=part.bound)
            given = absences if part.is_trained else None
            part.bound.apply(part.own(mean, change.clip), change.step, absences=given)

    def square(self, change: Change) -> int:
        mean = self._mean(change)
        found: list[int] = []

        def add(part: _Part) -> None:
            own, first = self._layout.owned_trained, part.where.start
            here = slice(max(own.start - first, 0), max(own.stop - first, 0))
            found.append(part.bound.square(part.own(mean).at(here)))

        self._team.run([partial(add, part) for part in self._parts if part.is_trained])
        return sum(found)

    def _part(self, number: int, layout: PartLayout) -> _Part:
        redo = self._segment.redo(number) if self._safe else None
        return _Part(self._arrays, layout, redo, self._runs, self._update)

    def _numbers(self, change: Change) -> list[Numbers]:
        """Return the hyperparameters: those of :meth:`begin`, unless the change is repaired."""
        if self._begun is not None and self._begun[0] is change:
            return self._begun[1]
        return self._parts[0].bound_for(change).numbers(change.step)

    def _measure(self, change: Change) -> None:
        """Compute the factors, which the update of every element needs."""
        mean, absences = self._mean(change), self._absences(self._absent(change), change.step)
        trained = [part for part in self._parts if part.is_trained]
        found: list[list[Squares]] = [[] for _ in trained]

        def measure(number: int) -> None:
            part = trained[number]
            found[number] = part.bound.squares(part.own(mean, change.clip), change.step, absences)

        self._team.run([partial(measure, number) for number in range(len(trained))])
        squares = chain.from_iterable(found)  # in this order, however many threads there are
        rules = rules_of(self._update, self._runs)
        self._segment.factors[:] = factors_of(rules, squares, self._sizes, change.step, absences)

    def _absent(self, change: Change) -> list[NDArray[np.uint8]]:
        """Return ABSENT of each gradient of a change, and of the sum if that is part of it."""
        given = [self._segment.absent(given.buffer) for given in change.contributions]
        return [self._segment.absent_of_sum, *given] if change.with_sum else given

    def _absences(self, absent: Sequence[NDArray[np.uint8]], step: int) -> Absences | None:
        """Count the variables without a gradient in update ``step``; None if there never were any.

        ``absent``: of all gradients. The counts before stay, for a repair counts again.
        """
        segment, rested = self._segment, self._segment.words[RESTED]
        if not absent[0].item(0) and not segment.words[MISSED] and not rested:
            return None
        in_all, before = np.minimum.reduce(absent)[1:], segment.missed[step % 2]
        np.add(before, in_all, out=segment.missed[(step + 1) % 2])
        segment.words[MISSED] = 1
        return Absences(in_all.tolist(), (before + rested).tolist())

    def _absences_in(self, change: Change) -> Absences | None:
        """Return the variables without a gradient in an update, counted as its kind has it."""
        absent = self._absent(change)
        if not change.local_steps:
            return self._absences(absent, change.step)
        self.carry_missed(change.step, change.step + change.local_steps)
        in_all = np.minimum.reduce(absent)[1:]
        return Absences(in_all.tolist(), [0] * len(in_all)) if in_all.any() else None

    def _mean(self, change: Change) -> Mean:
        """Return what is averaged, where the arithmetic happens.

        Each gradient has the weight of its batch. The sum is weighted already.
        """
        with_sum = change.with_sum and change.kind == UPDATE
        gradients, weights = ([self._arrays.sum], [1.0]) if with_sum else ([], [])
        for given in change.contributions:
            gradients.append(self._arrays.gradient(given.buffer))
            weights.append(given.weight / change.unit)
        return Mean.weighted(gradients, change.weight / change.unit, weights)


class _Part:
    """One part of the block, bound to its memory.

    State is assigned, whatever the rule: ``how`` says whether it becomes the mean of the gradients'
    values or the first one's. The moving average of state is the state itself.
    """

    def __init__(
        self,
        arrays: DeviceArrays,
        layout: PartLayout,
        redo: tuple[list[Flat], NDArray[np.int64]] | None,
        runs: Runs,
        update: Update,
    ) -> None:
        """``redo``: copies and progress, if changes must survive a killed process."""
        self.where, self._how = where, how = layout.where, layout.how
        self.is_trained = how == "update"
        if not self.is_trained:
            averages = tuple(Slot(name, None) for name in arrays.slots if name == AVERAGE)
            update, runs = Update(Assign(averages), fused=False), [Run(where)]
        parameters, self._sum = arrays.parameters[where], arrays.sum[where]
        slots = {slot.name: arrays.slots[slot.name][where] for slot in update.slots}
        self._redo: Redo | None = None
        self._redo_of_sum: Redo | None = None
        if redo is not None:
            copies, progress = redo
            changed = [parameters, *slots.values()]
            self._redo = Redo(changed, copies[: len(changed)], progress)
            self._redo_of_sum = Redo([self._sum], copies[:1], progress)
        self._settled = [parameters, *([slots[RESIDUAL]] if RESIDUAL in slots else [])]
        of_settled = [0, *([1 + [*slots].index(RESIDUAL)] if RESIDUAL in slots else [])]
        self._redo_of_settling = self._redo and self._redo.of(of_settled)
        own = list(_within(where, runs))
        self.bound = update.bind(parameters, slots, self._redo, own)
        alone = [run._replace(group=0) for run in own]

        @lru_cache(16)  # four for each number of workers
        def outer(among: int, cycle: int) -> BoundUpdate:
            rule = replace(update.outer, among=among, cycle=cycle)
            given = parameters, slots, self._redo, alone
            return Update(rule, fused=update.fused).bind(*given)

        self._outer = outer

    def bound_for(self, change: Change) -> BoundUpdate:
        """Return the update that makes this change."""
        if change.local_steps and self.is_trained:
            return self._outer(change.among, change.cycle)
        return self.bound

    def own(self, mean: Mean, clip: float = 1.0) -> Mean:
        """Return what a mean of gradients of the whole block is for this part.

        ``clip``: the factor of a mean of trained variables.
        """
        if self._how == "first":
            mean = Mean(mean.gradients[:1])
        elif clip != 1:
            mean = mean._replace(clip=clip)
        return mean.at(self.where)

    def begin(self) -> None:
        """Note that nothing of the next change is made."""
        if self._redo is not None:
            self._redo.begin()

    def resume(self, *, of_sum: bool, bound: BoundUpdate) -> None:
        """Finish the block in which a killed process left an update (``bound``), or the sum."""
        if not of_sum:
            bound.resume()
        elif self._redo_of_sum is not None:
            self._redo_of_sum.resume()

    def settle(self, target: Flat) -> None:
        """Move the parameters to their part of ``target``; the residual takes up the rest."""
        parameters, *residuals = self._settled
        own, size = target[self.where], len(parameters)
        whole = [(slice(0, size), self._settled)]
        blocks = self._redo_of_settling.blocks(size) if self._redo_of_settling else whole
        for block, (moved, *rests) in blocks:
            rest = parameters[block] - own[block]
            for residual, out in zip(residuals, rests, strict=True):
                np.add(residual[block], rest, out=out)
            np.copyto(moved, own[block])

    def resume_settling(self) -> None:
        """Finish the block in which a killed process was settling."""
        if self._redo_of_settling is not None:
            self._redo_of_settling.resume()

    def add(self, mean: Mean, *, begin: bool) -> None:
        """Add the only gradient, weighted, to the sum of the step, or begin the sum with it."""
        if self._how == "first" and not begin:
            return
        terms, weights = [*mean.gradients], [*(mean.weights or (1.0,))]
        if not begin:
            terms, weights = [self._sum, *terms], [1.0, *weights]
        if self._redo_of_sum is None:
            add_up(terms, weights, self._sum)
            return
        for block, (copy,) in self._redo_of_sum.blocks(len(self._sum)):
            add_up([term[block] for term in terms], weights, copy)


def runs_of(layout: ShardLayout, update: Update) -> tuple[Runs, list[int]]:
    """Return the runs of the shard's trained variables, and how many elements each has.

    The zeros between two slices go with the first; they are not counted.
    """
    sizes = [0] * len(layout.numbers)
    runs: list[Run] = []
    for cut, start, stop in layout.runs:
        if cut.variable.kind == "trained":
            number = layout.numbers[cut.variable.name]
            sizes[number] += cut.size
            group = update.group_of(cut.variable.name)
            runs.append(Run(slice(start, stop), number, group))
    return runs, sizes


def _within(where: slice, runs: Runs) -> Iterator[Run]:
    """Yield the runs of a part, counted from its begin."""
    for run in runs:
        start, stop = max(run.where.start, where.start), min(run.where.stop, where.stop)
        if start < stop:
            yield run._replace(where=slice(start - where.start, stop - where.start))
