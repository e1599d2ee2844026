"""Changes of a shard's memory that a killed process leaves whole.

A change is noted in the segment and then carried out run by run, as redo.py does it. Whoever finds
the segment of a process that was killed anywhere in this finishes the interrupted run and does the
rest, for the gradients still lie where they were. The result is the same bit for bit, for the
arithmetic on each element is. Nothing is synchronised to a disk: what dies is a process, not the
host.

The note is int64 words: state, count, step, whether the sum is part of it, order, number of
contributions, and for each contribution gradient, worker, sequence. The state is 0 while nothing
is noted, the kind of a change that is done, and its negative while it is under way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from zmqtrain.errors import ConfigError
from zmqtrain.optim import Update
from zmqtrain.optim.redo import Redo
from zmqtrain.store.arithmetic import Memory
from zmqtrain.store.segment import Segment
from zmqtrain.store.segment_layout import (
    ACCUMULATED,
    CLOCK,
    ORDERS,
    VERSION,
    Flat,
)

UPDATE, ACCUMULATE = 1, 2
"""Kinds of changes: of parameters and slots; of the sum."""

_HEAD = 6  # words before the contributions


class Contribution(NamedTuple):
    """A gradient of the segment, and whose push it came with."""

    gradient: int
    worker: int
    sequence: int


@dataclass(slots=True)
class Change:
    """What is done to the memory, as far as another process must know to finish it."""

    kind: int
    contributions: tuple[Contribution, ...]
    count: int  # gradients that are averaged; those in the sum after an accumulation
    step: int  # version before
    with_sum: bool = False  # the sum is part of the update, or is added to instead of begun
    order: int = 0  # carried out by it, 0: none


class Changes:
    """Carries out the changes of one segment. With ``safe`` False a killed process loses all."""

    def __init__(self, segment: Segment, memory: Memory, update: Update, *, safe: bool) -> None:
        """``memory``: where the arithmetic happens; of a safe segment, in place."""
        self._segment = segment
        self._memory = memory
        self._redo: Redo | None = None
        self._redo_sum: Redo | None = None
        if safe:
            arrays, areas = [segment.parameters, *segment.slots.values()], segment.redo
            self._redo = Redo(arrays, areas, segment.progress)
            self._redo_sum = Redo([segment.sum], areas[:1], segment.progress)
        self.bind(update)

    def bind(self, update: Update) -> None:
        """Make changes with this update from now on; it is the same in all but how fast it is."""
        self._update = update.bind(self._memory.parameters, self._memory.slots, self._redo)

    def carry_out(self, change: Change) -> None:
        """Make one change.

        Raises:
            ConfigError: the update rule refuses; nothing was changed.
        """
        words = self._segment.words
        words[CLOCK] += 1
        try:
            if self._redo is not None:
                self._note(change, self._redo)
            self._do(change)
        except ConfigError:
            self.forget()
            words[CLOCK] += 1
            raise
        self._finish(change)

    def repair(self) -> Change | None:
        """Finish what a killed process left, in a segment that was adopted.

        Returns the last change, finished now or before; None if there was none.
        """
        words = self._segment.words
        change = self.last()
        if change is not None and self._segment.change[0] < 0:
            redo = self._redo if change.kind == UPDATE else self._redo_sum
            if redo is not None:
                redo.resume()
            self._do(change)
            self._finish(change)
        words[CLOCK] += words[CLOCK] % 2
        return change

    def last(self) -> Change | None:
        """Return the last change that was noted."""
        note = self._segment.change
        state, count, step, with_sum, order, contributions = note[:_HEAD]
        if not state:
            return None
        at = range(_HEAD, _HEAD + 3 * contributions, 3)
        parts = tuple(Contribution(*note[place : place + 3]) for place in at)
        return Change(abs(state), parts, count, step, bool(with_sum), order)

    def forget(self) -> None:
        """Forget the last change: the parameters begin anew."""
        self._segment.change[0] = 0

    def _note(self, change: Change, redo: Redo) -> None:
        note = self._segment.change
        note[0] = 0
        values = [change.count, change.step, change.with_sum, change.order]
        values.append(len(change.contributions))
        for contribution in change.contributions:
            values += contribution
        for place, value in enumerate(values, 1):
            note[place] = value
        redo.begin()
        note[0] = -change.kind  # from here on it is to be finished

    def _do(self, change: Change) -> None:
        """Do what is not done."""
        gradients = self._gradients(change)
        if change.kind == UPDATE:
            self._update.apply_mean(gradients, change.count, change.step)
            self._memory.publish()
            return
        total = self._memory.sum
        if self._redo_sum is None:
            _add(gradients, slice(0, len(total)), out=total)
            return
        for run, (area,) in self._redo_sum.runs(len(total)):
            _add(gradients, run, out=area)

    def _finish(self, change: Change) -> None:
        words = self._segment.words
        if change.kind == UPDATE:
            words[VERSION] = change.step + 1
            words[ACCUMULATED] = 0
        else:
            words[ACCUMULATED] = change.count
        if change.order:
            words[ORDERS] = change.order
        if self._redo is not None:
            self._segment.change[0] = change.kind
        words[CLOCK] += words[CLOCK] % 2

    def _gradients(self, change: Change) -> list[Flat]:
        own = [self._memory.gradient(part.gradient) for part in change.contributions]
        return [self._memory.sum, *own] if change.with_sum else own


def _add(gradients: list[Flat], run: slice, out: Flat) -> None:
    """Write a run of the sum of one or two gradients."""
    if len(gradients) == 1:
        np.copyto(out, gradients[0][run])
    else:
        np.add(gradients[0][run], gradients[1][run], out=out)
