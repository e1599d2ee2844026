"""Changes of a shard's memory that a killed process leaves whole.

A change is noted in the segment and then carried out block by block: the block's old bytes go to
the undo area, the block is rewritten, one more block is counted as done. Whoever finds the segment
of a process that was killed anywhere in this puts the interrupted block back and does the rest, for
the gradients still lie where they were. The result is the same bit for bit, for the cut into blocks
and the arithmetic on each are the same. Nothing is synchronised to a disk: what dies is a process,
not the host.

The note is int64 words: state, count, step, whether the sum is part of it, order, number of
contributions, and for each contribution gradient, worker, sequence. The state is 0 while nothing
is noted, the kind of a change that is done, and its negative while it is under way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from zmqtrain.errors import ConfigError
from zmqtrain.optim import BoundUpdate, Update
from zmqtrain.optim.blocks import runs
from zmqtrain.store.segment import Segment
from zmqtrain.store.segment_layout import (
    ACCUMULATED,
    BLOCKS_DONE,
    BLOCKS_KEPT,
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


class _Block(NamedTuple):
    run: slice
    update: BoundUpdate
    kept: list[tuple[Flat, Flat]]  # this run of the parameters and of every slot; its undo area
    kept_sum: list[tuple[Flat, Flat]]  # the same of the sum


class Changes:
    """Carries out the changes of one segment. With ``safe`` False a killed process loses all."""

    def __init__(self, segment: Segment, update: Update, *, safe: bool) -> None:
        self._segment = segment
        self._safe = safe
        self.bind(update)

    def bind(self, update: Update) -> None:
        """Make changes with this update from now on; it is the same in all but how fast it is."""
        layout = self._segment.layout
        scratch = np.empty((2, layout.block), np.float32) if self._safe else None
        self._blocks = [
            self._block(update, run, scratch)
            for run in runs(layout.size, layout.block)
            if self._safe
        ]
        self._whole = self._block(update, slice(0, layout.size))
        if not self._blocks:  # an empty shard's updates count, too
            self._blocks.append(self._whole)

    def _block(self, update: Update, run: slice, scratch: Flat | None = None) -> _Block:
        segment, undo = self._segment, [area[: run.stop - run.start] for area in self._segment.undo]
        parameters = segment.parameters[run]
        slots = {name: slot[run] for name, slot in segment.slots.items()}
        kept = list(zip([parameters, *slots.values()], undo, strict=True))
        bound = update.bind(parameters, slots, scratch)
        return _Block(run, bound, kept, [(segment.sum[run], undo[0])])

    def carry_out(self, change: Change) -> None:
        """Make one change.

        Raises:
            ConfigError: the update rule refuses; nothing was changed.
        """
        words = self._segment.words
        words[CLOCK] += 1
        try:
            if self._safe:
                self._note(change)
                self._proceed(change)
            else:
                self._do(change, self._whole, self._gradients(change))
        except ConfigError:
            if self._safe and words[BLOCKS_KEPT]:
                self._put_back(change, self._blocks[0])
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
            done = words[BLOCKS_DONE]
            if words[BLOCKS_KEPT] > done:
                self._put_back(change, self._blocks[done])
            self._proceed(change)
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

    def _note(self, change: Change) -> None:
        words, note = self._segment.words, self._segment.change
        note[0] = 0
        values = [change.count, change.step, change.with_sum, change.order]
        values.append(len(change.contributions))
        for contribution in change.contributions:
            values += contribution
        for place, value in enumerate(values, 1):
            note[place] = value
        words[BLOCKS_DONE] = words[BLOCKS_KEPT] = 0
        note[0] = -change.kind  # from here on it is to be finished

    def _proceed(self, change: Change) -> None:
        """Do the blocks that are not done."""
        words, done = self._segment.words, self._segment.words[BLOCKS_DONE]
        gradients = self._gradients(change)
        for block in self._blocks[done:]:
            self._keep(change, block)
            done += 1
            words[BLOCKS_KEPT] = done
            self._do(change, block, gradients)
            words[BLOCKS_DONE] = done

    def _do(self, change: Change, block: _Block, gradients: list[Flat]) -> None:
        parts = [gradient[block.run] for gradient in gradients]
        if change.kind == UPDATE:
            block.update.apply_mean(parts, change.count, change.step)
        elif change.with_sum:
            parts[0] += parts[1]
        else:
            np.copyto(self._segment.sum[block.run], parts[0])

    def _finish(self, change: Change) -> None:
        words = self._segment.words
        if change.kind == UPDATE:
            words[VERSION] = change.step + 1
            words[ACCUMULATED] = 0
        else:
            words[ACCUMULATED] = change.count
        if change.order:
            words[ORDERS] = change.order
        if self._safe:
            self._segment.change[0] = change.kind
        words[CLOCK] += words[CLOCK] % 2

    def _gradients(self, change: Change) -> list[Flat]:
        segment = self._segment
        own = [segment.gradient(part.gradient) for part in change.contributions]
        return [segment.sum, *own] if change.with_sum else own

    def _keep(self, change: Change, block: _Block) -> None:
        for array, old in block.kept if change.kind == UPDATE else block.kept_sum:
            np.copyto(old, array)

    def _put_back(self, change: Change, block: _Block) -> None:
        for array, old in block.kept if change.kind == UPDATE else block.kept_sum:
            np.copyto(array, old)
