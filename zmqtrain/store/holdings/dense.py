"""The dense variables of a shard: one flat block of memory, changed by one update rule.

The block is cut into parts that threads change side by side. The segment's layout alone says where
they begin, and the arithmetic on an element does not depend on its place. So a change that was
begun by another number of threads is finished bit for bit: each part goes on block by block, as
optim/redo.py says. What a rule takes from whole variables (the factors of a LayerRule) is written
into the segment before the first element is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zmqtrain.compute.arrays import Flat, block_size, blocks
from zmqtrain.compute.device import Device
from zmqtrain.compute.threads import ThreadTeam
from zmqtrain.optim import Update
from zmqtrain.optim.formula import LayerRule, MatrixRule, Numbers
from zmqtrain.optim.layers import Squares, factors_of
from zmqtrain.optim.mean import Mean
from zmqtrain.optim.runs import Absences, Run, Runs
from zmqtrain.optim.whole import WholeVariable
from zmqtrain.store.changes import ACCUMULATE, SETTLE, UPDATE, Change
from zmqtrain.store.checkpoint import begin_slots, read_shard, tensors_of
from zmqtrain.store.holdings.dense_part import DeviceArrays, Part
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
        length = 16 * block_size(self._arrays.parameters)
        self._runs, self._pieces, self._sizes = runs_of(layout, update, length)
        self._initial = update.initial_slots(layout.numbers)
        self.use(update)

    def use(self, update: Update) -> None:
        """Update by this rule from now on; its slots are those of the one before."""
        self._update, self._is_layered = update, update.is_layered
        own, groups = update.by_group(), {run.variable: run.group for run in self._runs}
        self._rules = [own[groups[variable]].rule for variable in sorted(groups)]
        self._parts = [self._part(number, part) for number, part in enumerate(self._cut)]
        arrays = self._arrays
        seen = [run for run in self._runs if run.shape is not None]
        self._directions = np.zeros_like(arrays.parameters[: None if seen else 0])
        memory = arrays.parameters, arrays.slots, self._directions
        self._wholes = [WholeVariable(update, run, *memory) for run in seen]
        self._measured = replace(update, fused=False).bind(arrays.parameters, arrays.slots)
        self._begun: tuple[Change, list[Numbers]] | None = None

    def check(self, step: int) -> None:
        """Check that the rule can make update ``step``.

        Raises:
            ConfigError: it cannot.
        """
        self._parts[0].bound.numbers(step)

    def begin(self, change: Change) -> None:
        if change.kind == UPDATE:
            bound, step = self._parts[0].bound_for(change), change.step
            self._begun = change, bound.numbers(step)
            if self._is_layered and not change.local_steps:
                absences = self._absences(self._absent(change), step)
                squares = self._measure(change, absences)
                given = self._rules, squares, self._sizes, step, absences
                self._segment.factors[:] = factors_of(*given)
        self.begin_parts()

    def update(self, change: Change) -> None:
        mean, step = self._mean(change), change.step
        is_layered = self._is_layered and not change.local_steps
        factors = self._segment.factors if is_layered else None
        given, absences = (step, factors, self._numbers(change)), self._absences_in(change)
        if is_layered and not self._is_begun(change):
            self._measure(change, absences, self._done())
        calls = [
            partial(
                part.bound_for(change).apply,
                part.own(mean, change.clip),
                *given,
                absences,
                self._directions[part.where] if is_layered else None,
            )
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

    def begin_parts(self, numbers: Iterable[int] | None = None) -> None:
        """Note that nothing of the next change of these parts, None: of all, is made."""
        for number in range(len(self._parts)) if numbers is None else numbers:
            self._parts[number].begin()

    def update_parts(self, numbers: Iterable[int], change: Change) -> None:
        """Make, or finish, an update of these parts, which is not a noted change.

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

        def add(part: Part) -> None:
            own, first = self._layout.owned_trained, part.where.start
            here = slice(max(own.start - first, 0), max(own.stop - first, 0))
            found.append(part.bound.square(part.own(mean).at(here)))

        self._team.run([partial(add, part) for part in self._parts if part.is_trained])
        return sum(found)

    def _part(self, number: int, layout: PartLayout) -> Part:
        redo = self._segment.redo(number) if self._safe else None
        return Part(self._arrays, layout, redo, self._runs, self._update)

    def _numbers(self, change: Change) -> list[Numbers]:
        """Return the hyperparameters: those of :meth:`begin`, unless the change is repaired."""
        if self._begun is not None and self._is_begun(change):
            return self._begun[1]
        return self._parts[0].bound_for(change).numbers(change.step)

    def _is_begun(self, change: Change) -> bool:
        """Whether this process has begun the change, which it otherwise repairs."""
        return self._begun is not None and self._begun[0] is change

    def _done(self) -> NDArray[np.bool_]:
        """Return which elements of the block an interrupted change has changed."""
        done = np.zeros(len(self._arrays.parameters), np.bool_)
        for part in self._parts:
            done[part.where][: part.done] = True
        return done

    def _measure(
        self, change: Change, absences: Absences | None, done: NDArray[np.bool_] | None = None
    ) -> list[Squares]:
        """Compute the directions of variables that a MatrixRule sees; return all sums of squares.

        ``done``: what an interrupted update has changed, whose factors are known; None: nothing.
        """
        given = self._mean(change)._replace(clip=change.clip), change.step, absences
        calls = [partial(whole.measure, *given, done) for whole in self._wholes]
        if done is None:
            calls += [partial(self._measured.squares, piece, *given) for piece in self._pieces]
        found: dict[int, Squares] = {}

        def measure(number: int) -> None:
            found[number] = calls[number]()

        self._team.run([partial(measure, number) for number in range(len(calls))])
        return [found[number] for number in sorted(found)]  # however many threads there are

    def _absent(self, change: Change) -> list[NDArray[np.uint8]]:
        """Return ABSENT of each gradient of a change, and of the sum if that is part of it."""
        given = [self._segment.absent(given.buffer) for given in change.contributions]
        return [self._segment.absent_of_sum, *given] if change.with_sum else given

    def _absences(self, absent: Sequence[NDArray[np.uint8]], step: int) -> Absences | None:
        """Count the variables without a gradient in update ``step``; None if there never were any.

        ``absent``: marks of all gradients. Former counts stay, because a repair counts again.
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
        """Return the gradients to average, where the arithmetic happens.

        Each gradient has the weight of its batch. The sum is weighted already.
        """
        with_sum = change.with_sum and change.kind == UPDATE
        gradients, weights = ([self._arrays.sum], [1.0]) if with_sum else ([], [])
        for given in change.contributions:
            gradients.append(self._arrays.gradient(given.buffer))
            weights.append(given.weight / change.unit)
        return Mean.weighted(gradients, change.weight / change.unit, weights)


def runs_of(layout: ShardLayout, update: Update, length: int) -> tuple[Runs, Runs, list[int]]:
    """Return the runs of the shard's trained variables, pieces, and the variables' sizes.

    The zeros between two slices go with the first run, and are not counted. Pieces, of up to
    ``length`` elements, are of variables whose squares are added up. They depend on the variable
    alone, so that all shards that hold it have the same sums.
    """
    sizes = [0] * len(layout.numbers)
    rules = [each.rule for each in update.by_group()]
    runs, pieces = list[Run](), list[Run]()
    for cut, start, stop in layout.runs:
        if cut.variable.kind == "trained":
            number = layout.numbers[cut.variable.name]
            sizes[number] += cut.size
            group, shape = update.group_of(cut.variable.name), cut.variable.shape
            rule = rules[group]
            is_seen = isinstance(rule, MatrixRule) and rule.sees(shape)
            runs.append(Run(slice(start, stop), number, group, shape if is_seen else None))
            if isinstance(rule, LayerRule) and not is_seen:
                pieces += [Run(at, number, group) for at in blocks(start + cut.size, length, start)]
    return runs, pieces, sizes
