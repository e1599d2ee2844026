"""Changes of a shard's memory that a killed process leaves whole.

A change is noted in the segment and then made part by part, and each part block by block as
redo.py does it. A process that adopts the segment of one that was killed in this finishes
the interrupted blocks and does the rest, since the gradients are still there. The result is
the same bit for bit, for the arithmetic on each element is; what it takes from whole variables (the
factors of a LayerRule) is noted before the first element is changed. Nothing is synchronised to a
disk: what dies is a process, not the host.

The note is int64 words: state, examples, unit, step, whether the sum is part of it, order, number
of contributions, and for each contribution gradient, worker, sequence, examples. The state is 0
while nothing is noted, the kind of a change that is done, and its negative while it is under way.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple

from zmqtrain.compute.threads import Call, ThreadTeam
from zmqtrain.errors import ConfigError
from zmqtrain.optim import Update
from zmqtrain.optim.pipeline import Pieces, Squares, factors_of, rules_of
from zmqtrain.store.arithmetic import Memory
from zmqtrain.store.parts import Mean, Part, StatePart, part_of
from zmqtrain.store.segment import Segment
from zmqtrain.store.segment_layout import (
    ACCUMULATED,
    CLOCK,
    IN_FORCE,
    ORDERS,
    VERSION,
)

UPDATE, ACCUMULATE = 1, 2
"""Kinds of changes: of parameters and slots; of the sum."""

_HEAD = 7  # words before the contributions


class Contribution(NamedTuple):
    """A gradient buffer of the segment, the worker and push that filled it, from so many examples.

    It is their mean gradient.
    """

    buffer: int
    worker: int
    sequence: int
    examples: int


@dataclass(slots=True)
class Change:
    """One change of the memory: all that another process needs to finish it."""

    kind: int
    contributions: tuple[Contribution, ...]
    examples: int  # of all gradients that are averaged, or that are in the sum after it
    unit: int  # a gradient of so many examples has weight 1
    step: int  # version before
    with_sum: bool = False  # the sum is part of the update, or is added to instead of begun
    order: int = 0  # carried out by it, 0: none


class Changes:
    """Makes the changes of one segment. Unless ``safe``, a killed process loses all."""

    def __init__(
        self,
        segment: Segment,
        memory: Memory,
        update: Update,
        pieces: Pieces,
        sizes: Sequence[int],
        *,
        safe: bool,
        threads: int | None,
    ) -> None:
        """``memory``: where the arithmetic happens; of a safe segment, in place.

        ``pieces``: which elements are of which trained variable; ``sizes``: how many each has.
        """
        self._segment = segment
        self._sizes, self._rules = sizes, rules_of(update, pieces)
        self._memory = memory
        self._update = update
        self._is_layered = update.is_layered
        self._safe = safe
        self._team = ThreadTeam(threads)
        self._parts = [
            part_of(memory, part, segment.redo(number) if safe else None, pieces, update)
            for number, part in enumerate(memory.parts)
        ]
        self._state = [part for part in self._parts if isinstance(part, StatePart)]
        self._trained = self._parts[: len(self._parts) - len(self._state)]

    def make(self, change: Change) -> None:
        """Make one change.

        Raises:
            ConfigError: the update rule refuses; nothing was changed.
        """
        words = self._segment.words
        words[CLOCK] += 1
        try:
            if change.kind == UPDATE and self._is_layered:
                self._measure(change)
            if self._safe:
                self._note(change)
            self._carry_out(change)
        except ConfigError:
            self.forget()
            words[CLOCK] += 1
            raise
        self._finish(change)

    def check(self, step: int) -> None:
        """Check that the rule can make update ``step``.

        Raises:
            ConfigError: it cannot.
        """
        self._update.check(step)

    def begin_parts(self, numbers: Iterable[int]) -> None:
        """Nothing of the next update of these parts is done."""
        for number in numbers:
            self._parts[number].begin()

    def update_parts(self, numbers: Iterable[int], buffers: Sequence[int], step: int) -> None:
        """Make, or finish, update ``step`` of these parts, which is not noted.

        The rule is not layered and does not refuse it. The mean is of the gradients in ``buffers``,
        which weigh the same.
        """
        gradients = [self._memory.gradient(buffer) for buffer in buffers]
        mean = Mean(gradients, None, len(gradients))
        for number in numbers:
            self._parts[number].resume(of_sum=False)
            self._parts[number].update(mean, step, None)

    def repair(self) -> Change | None:
        """Finish what a killed process left, in a segment that was adopted.

        Returns the last change, finished now or before; None if there was none.
        """
        words = self._segment.words
        change = self.last()
        if change is not None and self._segment.change[0] < 0:
            for part in self._parts:
                part.resume(of_sum=change.kind == ACCUMULATE)
            self._carry_out(change)
            self._finish(change)
        if not self._segment.board[IN_FORCE]:
            words[CLOCK] += words[CLOCK] % 2
        return change

    def last(self) -> Change | None:
        """Return the last change that was noted."""
        note = self._segment.change
        state, examples, unit, step, with_sum, order, contributions = note[:_HEAD]
        if not state:
            return None
        at = range(_HEAD, _HEAD + 4 * contributions, 4)
        parts = tuple(Contribution(*note[place : place + 4]) for place in at)
        return Change(abs(state), parts, examples, unit, step, bool(with_sum), order)

    def forget(self) -> None:
        """Forget the last change: new parameters begin."""
        self._segment.change[0] = 0

    def _note(self, change: Change) -> None:
        note = self._segment.change
        note[0] = 0
        values = [change.examples, change.unit, change.step, change.with_sum, change.order]
        values.append(len(change.contributions))
        for contribution in change.contributions:
            values += contribution
        note[1 : 1 + len(values)] = memoryview(array("q", values))
        for part in self._parts:
            part.begin()
        note[0] = -change.kind  # from here on another process would finish it

    def _carry_out(self, change: Change) -> None:
        """Make or finish a change: state after the rest, for the update rule may refuse."""
        self._team.run(self._calls(change, self._trained))
        if self._state:
            self._team.run(self._calls(change, self._state))

    def _calls(self, change: Change, parts: Sequence[Part]) -> list[Call]:
        """Return the calls, in any order, that finish a change of these parts."""
        mean = self._mean(change)
        if change.kind == UPDATE:
            factors = self._segment.factors if self._is_layered else None
            return [partial(part.update, mean, change.step, factors) for part in parts]
        (gradient,), (weight,) = mean.gradients, mean.weights or (1,)
        begin = not change.with_sum
        return [partial(part.add, gradient, weight, begin=begin) for part in parts]

    def _measure(self, change: Change) -> None:
        """Compute the factors, which the update of every element needs."""
        given = self._mean(change), change.step
        found: list[list[Squares]] = [[] for _ in self._trained]

        def measure(number: int) -> None:
            found[number] = self._trained[number].squares(*given)

        self._team.run([partial(measure, number) for number in range(len(self._trained))])
        squares = chain.from_iterable(found)  # in this order, however many threads there are
        self._segment.factors[:] = factors_of(self._rules, squares, self._sizes, change.step)

    def _mean(self, change: Change) -> Mean:
        """Return what is averaged, where the arithmetic happens.

        Each example weighs the same, whatever batch it was in. The sum is weighted already.
        """
        with_sum = change.with_sum and change.kind == UPDATE
        gradients, weights = ([self._memory.sum], [1.0]) if with_sum else ([], [])
        for part in change.contributions:
            gradients.append(self._memory.gradient(part.buffer))
            weights.append(part.examples / change.unit)
        is_even = weights.count(1) == len(weights)
        return Mean(gradients, None if is_even else weights, change.examples / change.unit)

    def _finish(self, change: Change) -> None:
        words = self._segment.words
        if change.kind == UPDATE:
            self._memory.publish()
            words[VERSION] = change.step + 1
            if change.with_sum:  # else the step that the sum is of goes on
                words[ACCUMULATED] = 0
        else:
            words[ACCUMULATED] = change.examples
        if change.order:
            words[ORDERS] = change.order
        if self._safe:
            self._segment.change[0] = change.kind
        words[CLOCK] += words[CLOCK] % 2
