"""The board: how workers of one host make steps in a shard's segment, and send nothing.

While a *roster* of workers is in force, the ps changes nothing. Each member has a *seat*, a line of
words, and makes a step so:

1. It writes its gradient into its buffer, and raises its word MADE: the gradient is ready.
2. When all gradients are, it applies their mean, added up in the roster's order, to the parts of
   the shard that it owns, and raises its word DONE.
3. When all have done so, the step is made: everybody has the new parameters.

The ps ends a roster by *taking* seats: a word MADE that is taken is odd, and its member cannot
raise it any more. So all see the same: a step is made if all of its gradients are ready, whoever
dies then; otherwise nobody makes it, and each gradient lies in its buffer, to be pushed as ever.

A member resets the progress of its parts (redo.py) before it raises MADE. So the parts of a dead
one can be finished, bit for bit.

Both words hold the roster's number above, and twice the number of its steps below: who comes late,
from a roster that is over, changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from zmqtrain.store import words
from zmqtrain.store.segment import Segment
from zmqtrain.store.segment_layout import BOARD_LINE, CLOCK, IN_FORCE, VERSION
from zmqtrain.store.shard import Shard

NUMBER, _, BEGAN, STEPS, NEXT_BATCH, MEMBERS = range(6)
"""Words of the first line: number of the roster; IN_FORCE; version at its begin; steps that it has
at most; first batch that nobody had been given then; how many members."""

MADE, DONE, WORKER, INCARNATION, BUFFER = range(5)
"""Words of a seat: gradients ready; slices updated; whose it is, and where its gradients lie."""

FIGURES = (5, 8)
"""Where, in a seat, its figures begin: after an even number of steps, and after an odd one."""

_ABOVE = 32  # bits of the number of steps


class Holder(NamedTuple):
    """Who has a seat: a worker's life, and the buffer of its gradients."""

    worker: int
    incarnation: int
    buffer: int


class Figures(NamedTuple):
    """What a member has counted since the roster began: examples, the sum of their losses.

    ``last`` is the mean loss of its last batch.
    """

    examples: int = 0
    loss: float = 0.0
    last: float = 0.0


def owned(sizes: Sequence[int], members: int) -> list[range]:
    """Return which of the parts of these sizes each member updates: equal shares, in order."""
    total, before, last = max(sum(sizes), 1), 0, 0
    bounds = [0] * (members + 1)
    for part, size in enumerate(sizes, 1):
        middle = min((2 * before + size) * members // (2 * total), members - 1)
        last = max(last, middle)
        bounds[last + 1] = part
        before += size
    for member in range(members):
        bounds[member + 1] = max(bounds[member + 1], bounds[member])
    return [range(*bounds[member : member + 2]) for member in range(members)]


class Board:
    """The board of one segment. The ps opens and closes it and takes seats; members have a Seat."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._words = segment.board
        self._losses = segment.board.view(np.float64)
        self._address = segment.board.ctypes.data

    @property
    def in_force(self) -> bool:
        return bool(self._words[IN_FORCE])

    @property
    def began(self) -> int:
        """The version at which the roster began."""
        return int(self._words[BEGAN])

    @property
    def holders(self) -> list[Holder]:
        """The members in their order; one of buffer -1 was gone before the roster began."""
        lines = map(self._line, range(self._words[MEMBERS]))
        return [Holder(*self._words[at + WORKER : at + BUFFER + 1].tolist()) for at in lines]

    @property
    def made(self) -> int:
        """Steps of which all gradients are ready."""
        return min(self._counts(MADE))

    @property
    def sealed(self) -> int:
        """Steps that are made."""
        return min(self._counts(DONE))

    @property
    def is_over(self) -> bool:
        """Whether no further step will be made, and the last one is."""
        made = self._counts(MADE)
        over = any(self.is_taken(place) for place, count in enumerate(made) if count == min(made))
        return over and self.sealed == min(made)

    def open(self, version: int, steps: int, next_batch: int, holders: Sequence[Holder]) -> None:
        """Put a roster in force, whose members have not been told; :meth:`close` ends it."""
        board, number = self._words, int(self._words[NUMBER]) % (1 << 30) + 1
        board[IN_FORCE] = 0
        board[NUMBER : MEMBERS + 1] = number, 0, version, steps, next_batch, len(holders)
        for place, holder in enumerate(holders):
            at = self._line(place)
            board[at : at + BOARD_LINE] = 0
            board[at + MADE] = board[at + DONE] = number << _ABOVE
            board[at + WORKER : at + BUFFER + 1] = holder
            if holder.buffer < 0:
                self.take(place)
        self._segment.words[CLOCK] |= 1
        board[IN_FORCE] = 1

    def close(self) -> None:
        """The roster is over: the shard is the ps's again, at the version it was brought to."""
        changing = self._segment.words
        changing[VERSION] = self.began + self.made
        self._words[IN_FORCE] = 0
        changing[CLOCK] += changing[CLOCK] % 2

    def take(self, place: int) -> None:
        """Take a seat: its member makes no further gradient ready."""
        address, value = self._at(place, MADE), self._value(place, MADE)
        while not value & 1 and not words.swap(address, value, value | 1):
            value = self._value(place, MADE)
        words.wake(address)

    def is_taken(self, place: int) -> bool:
        return bool(self._value(place, MADE) & 1)

    def lacks(self, place: int) -> bool:
        """Say whether this member's slice of a step with all gradients is not updated yet."""
        return self._counts(DONE)[place] < self.made

    def finish(self, place: int, shard: Shard) -> None:
        """Update the slice of a member that has died, or the rest of it."""
        seat = Seat(self, shard, place)
        seat.steps = self.made - 1
        seat.update()

    def figures(self, place: int, steps: int) -> Figures:
        """Return what a member had counted after so many steps, the last or the one before."""
        at = self._line(place) + FIGURES[steps % 2]
        return Figures(int(self._words[at]), *self._losses[at + 1 : at + 3].tolist())

    def _set_figures(self, place: int, steps: int, figures: Figures) -> None:
        at = self._line(place) + FIGURES[steps % 2]
        self._words[at] = figures.examples
        self._losses[at + 1 : at + 3] = figures[1:]

    def seat_of(self, worker: int, incarnation: int, shard: Shard) -> Seat | None:
        """Return the seat of a worker's life in the roster that is in force."""
        if not self.in_force:
            return None
        for place, holder in enumerate(self.holders):
            if holder[:2] == (worker, incarnation):
                return Seat(self, shard, place)
        return None

    def behind(self, word: int, number: int, steps: int) -> int:
        """Return a member whose word is below that of so many steps, a taken seat first; or -1."""
        target = number << _ABOVE | 2 * steps
        return words.behind(self._at(0, word), int(self._words[MEMBERS]), BOARD_LINE, target)

    def wait(self, place: int, word: int, number: int, steps: int, limit_s: float) -> None:
        """Wait at most so long while a word is below that of so many steps, and not taken."""
        value = self._value(place, word)
        if value < (number << _ABOVE | 2 * steps) and not value & 1:
            words.wait(self._at(place, word), value, limit_s)

    def _counts(self, word: int) -> list[int]:
        lines = map(self._line, range(self._words[MEMBERS]))
        return [int(self._words[at + word] & (1 << _ABOVE) - 1) >> 1 for at in lines]

    def _value(self, place: int, word: int) -> int:
        return int(self._words[self._line(place) + word])

    def _at(self, place: int, word: int) -> int:
        return self._address + 8 * (self._line(place) + word)

    @staticmethod
    def _line(place: int) -> int:
        return BOARD_LINE * (1 + place)


class Seat:
    """A member's part in a roster. ``steps``: those that are made."""

    def __init__(self, board: Board, shard: Shard, place: int) -> None:
        """``shard``: in the board's segment, as this process sees it."""
        shard.take_over_rate()
        self._board, self._shard, self.place = board, shard, place
        header = board._words[: MEMBERS + 1].tolist()
        self._number, _, self._began, self._limit, self._next_batch, members = header
        self.holders = board.holders
        self._buffers = [holder.buffer for holder in self.holders]
        sizes = [part.where.stop - part.where.start for part in shard.segment.layout.parts]
        self._own = owned(sizes, members)[place]
        self.steps = 0
        self._figures = Figures()

    @property
    def is_private(self) -> bool:
        """Whether all members are in this process."""
        return self._shard.segment.path is None

    @property
    def version(self) -> int:
        return int(self._began) + self.steps

    def offer(self, examples: int, loss: float) -> bool:
        """Say that the gradient is ready, computed from so many examples with this mean loss.

        False: it is to be pushed, for the roster is over, or the update is not made by parts.
        """
        if self._board._value(self.place, MADE) != (self._number << _ABOVE | 2 * self.steps):
            return False  # what follows is written where a later roster may write
        if self.steps == self._limit or not self._shard.can_update(examples, self.version):
            return False
        self._shard.begin_parts(self._own)
        before = self._figures
        self._figures = Figures(before.examples + examples, before.loss + examples * loss, loss)
        self._board._set_figures(self.place, self.steps + 1, self._figures)
        return self._raise(MADE)

    def missing(self, word: int) -> int:
        """Return a member whose word is not raised in this step, a taken seat first; -1: none."""
        return self._board.behind(word, self._number, self.steps + 1)

    def wait(self, place: int, word: int, limit_s: float) -> None:
        """Wait at most so long for a member that is missing to raise its word."""
        self._board.wait(place, word, self._number, self.steps + 1, limit_s)

    def is_over(self, place: int) -> bool:
        """Say whether this member will not make its gradient of this step ready.

        Its seat may be taken also after it has.
        """
        value = self._board._value(place, MADE)
        return bool(value & 1) and value < (self._number << _ABOVE | 2 * (self.steps + 1))

    def update(self) -> None:
        """Apply all gradients, which are ready, to this member's slice of the shard."""
        self._shard.update_parts(self._own, self._buffers, self.version)
        self._raise(DONE)

    def end_step(self) -> int:
        """The step is made; return the batch that this member is given with it."""
        batch: int = self._next_batch + self.steps * len(self.holders) + self.place
        self.steps += 1
        return batch

    def _raise(self, word: int) -> bool:
        address, value = self._board._at(self.place, word), self._number << _ABOVE | 2 * self.steps
        raised = words.swap(address, value, value + 2)
        words.wake(address)
        return raised
