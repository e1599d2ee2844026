"""The board: workers of one host make steps in a shard's segment, without messages.

While a *roster* of workers is in force, the ps changes nothing. Each member has a *seat*, a line of
words, and makes a step in three phases:

1. It writes its gradient into its buffer, and raises its word MADE: the gradient is ready.
2. When all gradients are ready, it claims its *slice*, the parts of the shard that it owns, in its
   word DONE, applies the mean, added up in the roster's order, and raises DONE.
3. When all members have done so, the step is made: everybody has the new parameters.

The ps ends a roster by *taking* seats: a word MADE that is taken is odd, and its member cannot
raise it any more. So all tasks agree: a step is made if all of its gradients are ready, even if
members die then. Otherwise it is not made, and each member pushes the gradient in its buffer.

A slice is written by the task that has claimed it. The ps claims the slice of a member that has
left, and goes on with that of a member whose process has ended: DONE tells whether the
progress of its parts (redo.py) means anything yet, so the result is the same bit for bit.

The upper bits of a word hold the roster's number, the middle ones the number of its steps, and the
lower ones the rest. So a late member of a roster that is over changes no word. The figures behind
its gradient, which it writes beside words, are its own for as long as it lives.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from zmqtrain.errors import FencedError
from zmqtrain.metrics.sums import added
from zmqtrain.models.tables import RowsOf
from zmqtrain.store import words
from zmqtrain.store.board_share import BoardShare
from zmqtrain.store.segment import Segment
from zmqtrain.store.segment_layout import BOARD_LINE, CLOCK, FIGURES, HEAD, IN_FORCE, SUMS, VERSION
from zmqtrain.store.shard import Shard

NUMBER, _, BEGAN, STEPS, NEXT_BATCH, MEMBERS = range(6)
"""Words of the first line: number of the roster; IN_FORCE; version at its begin; steps that it has
at most; first batch that nobody had been given then; how many members."""

MADE, DONE, WORKER, INCARNATION, BUFFER = range(5)
"""Words of a seat: gradients ready; slices updated; whose it is, and where its gradients lie."""

_ABOVE = 32  # bits of all but the number of the roster
_STEP = 8  # one step in a word
_TAKEN = 1  # of MADE
_MEMBER, _PS, _NOBODY = 1, 2, 3  # of DONE: the task that may write to the slice; 0: any
_WRITER = 3  # bits of the writer
_BEGUN = 4  # of DONE: the progress of its parts is that of this step


Sums: TypeAlias = Mapping[str, float]


class Holder(NamedTuple):
    """The holder of a seat: an incarnation of a worker, and the buffer of its gradients."""

    worker: int
    incarnation: int
    buffer: int


class Terms(NamedTuple):
    """The values that do not change during a roster."""

    number: int
    began: int  # version
    steps: int  # that it has at most
    next_batch: int  # the first that no worker had at the beginning
    holders: list[Holder]


class Figures(NamedTuple):
    """Counts of a member since the roster began.

    ``examples``: number of examples. ``loss``: sum of the mean losses times their weights, whose
    sum is ``weight``. ``last``: mean loss of the last batch; ``last_weight``: its weight.
    ``sums``: sums of all other measures.
    """

    examples: int = 0
    loss: float = 0.0
    last: float = 0.0
    weight: float = 0.0
    last_weight: float = 0.0
    sums: Sums = MappingProxyType({})


class Board:
    """The board of one segment. The ps opens and closes it and takes seats; members have a Seat."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._address = segment.board.ctypes.data

    @property
    def in_force(self) -> bool:
        return bool(self._read(IN_FORCE))

    @property
    def roster(self) -> Terms:
        number, began, steps, batch = map(self._read, (NUMBER, BEGAN, STEPS, NEXT_BATCH))
        return Terms(number, began, steps, batch, self.holders)

    @property
    def holders(self) -> list[Holder]:
        """The members in their order; one of buffer -1 was gone before the roster began."""
        lines = map(self._line, range(self._read(MEMBERS)))
        return [Holder(*map(self._read, range(at + WORKER, at + BUFFER + 1))) for at in lines]

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
        """Put a roster in force, of which its members do not know yet; :meth:`close` ends it.

        The ps has called :meth:`Shard.keep_frozen` before.
        """
        number = self._read(NUMBER) % (1 << 30) + 1
        header = {IN_FORCE: 0, NUMBER: number, BEGAN: version, STEPS: steps}
        for word, value in (header | {NEXT_BATCH: next_batch, MEMBERS: len(holders)}).items():
            self._write(word, value)
        for place, holder in enumerate(holders):
            made = number << _ABOVE | (_TAKEN if holder.buffer < 0 else 0)
            for word, value in enumerate((made, number << _ABOVE, *holder), self._line(place)):
                self._write(word, value)
        self._segment.words[CLOCK] |= 1
        self._write(IN_FORCE, 1)

    def close(self) -> None:
        """The roster is over: the shard is the ps's again, at the version it was brought to.

        A member that has slept since its last step can no longer claim a slice before the next
        roster puts its numbers there, seat by seat.
        """
        changing = self._segment.words
        changing[VERSION] = self.roster.began + self.made
        for place in range(self._read(MEMBERS)):
            at = self._line(place) + DONE
            self._write(at, self._read(at) | _NOBODY)
        self._write(IN_FORCE, 0)
        changing[CLOCK] += changing[CLOCK] % 2

    def take(self, place: int) -> None:
        """Take a seat: its member makes no further gradient ready."""
        address, value = self._at(place, MADE), self.value(place, MADE)
        while not value & _TAKEN and not words.swap(address, value, value | _TAKEN):
            value = self.value(place, MADE)
        words.wake(address)

    def is_taken(self, place: int) -> bool:
        return bool(self.value(place, MADE) & _TAKEN)

    def lacks(self, place: int) -> bool:
        """Return whether this member's slice of a step with all gradients is not updated yet."""
        return self._counts(DONE)[place] < self.made

    def finish(self, place: int, shard: Shard, *, is_dead: bool) -> bool:
        """Update the slice of a member that has left, or the rest of it, once all are ready.

        ``is_dead``: its process has ended. False: it lives, and is writing to its slice.
        """
        seat = Seat(self, shard, place, self.roster)
        seat.steps = self.made - 1
        return seat.finish(is_dead=is_dead)

    def figures(self, place: int, steps: int) -> Figures:
        """Return the counts of a member after ``steps`` steps: the last one or the one before."""
        if not steps:
            return Figures()
        found = self._figures(self._read(self._line(place) + BUFFER), steps)
        examples, *numbers = found[:HEAD].tolist()
        sums = found[HEAD : HEAD + SUMS].tolist()
        text = found[HEAD + SUMS :].tobytes().rstrip(b"\0").decode()
        names = text.split("\n") if text else ()
        figures = Figures(int(examples), *numbers)
        return figures._replace(sums=dict(zip(names, sums, strict=False)))

    def weights(self, buffers: Sequence[int], steps: int) -> list[float]:
        """Return the weight of each member's batch in step ``steps`` of the roster."""
        return [float(self._figures(buffer, steps)[HEAD - 1]) for buffer in buffers]

    def set_figures(self, buffer: int, steps: int, figures: Figures) -> None:
        half, (*numbers, sums) = self._figures(buffer, steps), figures
        half[: HEAD + len(sums)] = [*numbers, *sums.values()]
        names = "\n".join(sums).encode().ljust(half[HEAD + SUMS :].nbytes, b"\0")
        half[HEAD + SUMS :] = np.frombuffer(names, np.float64)

    def _figures(self, buffer: int, steps: int) -> NDArray[np.float64]:
        half = FIGURES // 2
        return self._segment.figures(buffer)[steps % 2 * half :][:half]

    def seat_of(self, worker: int, incarnation: int, shard: Shard) -> Seat | None:
        """Return the seat of a worker's life in the roster that is in force."""
        number = self._read(NUMBER)
        if not self.in_force:
            return None
        roster = self.roster
        if self._read(NUMBER) != number:
            return None  # the next one has begun meanwhile, and this is half of each
        for place, holder in enumerate(roster.holders):
            if holder[:2] == (worker, incarnation):
                return Seat(self, shard, place, roster)
        return None

    def behind(self, word: int, members: int, target: int) -> int:
        """Return a member whose word is below ``target``, a taken seat first; or -1."""
        return words.behind(self._at(0, word), members, BOARD_LINE, target)

    def wait(self, place: int, word: int, target: int, limit_s: float) -> None:
        """Wait at most so long while a word is below ``target``, and not taken."""
        value = self.value(place, word)
        if value < target and not (word == MADE and value & _TAKEN):
            words.wait(self._at(place, word), value, limit_s)

    def value(self, place: int, word: int) -> int:
        return self._read(self._line(place) + word)

    def swap(self, place: int, word: int, expected: int, value: int) -> bool:
        """Change a member's word; False: it is not as expected."""
        return words.swap(self._at(place, word), expected, value)

    def wake(self, place: int, word: int) -> None:
        words.wake(self._at(place, word))

    def _counts(self, word: int) -> list[int]:
        values = [self.value(place, word) for place in range(self._read(MEMBERS))]
        return [(value & (1 << _ABOVE) - 1) // _STEP for value in values]

    def _at(self, place: int, word: int) -> int:
        return self._address + 8 * (self._line(place) + word)

    def _read(self, word: int) -> int:
        return words.read(self._address + 8 * word)

    def _write(self, word: int, value: int) -> None:
        words.write(self._address + 8 * word, value)

    @staticmethod
    def _line(place: int) -> int:
        return BOARD_LINE * (1 + place)


class Seat:
    """A member's part in a roster. ``steps``: those that are made."""

    def __init__(self, board: Board, shard: Shard, place: int, roster: Terms) -> None:
        """``shard``: in the board's segment, as this process sees it."""
        shard.take_over_rate()
        self._board, self._shard, self.place = board, shard, place
        self._number, self._began, self._limit, self._next_batch, self.holders = roster
        self._buffers = [holder.buffer for holder in self.holders]
        self._own = BoardShare(shard, place, len(self.holders))
        self.steps = 0
        self._figures = Figures()

    @property
    def is_private(self) -> bool:
        """Whether all members are in this process."""
        return self._shard.segment.path is None

    @property
    def version(self) -> int:
        return self._began + self.steps

    def has_room(self, rows: Sequence[RowsOf]) -> bool:
        """Return whether there is memory for a step in which every member has this many new rows.

        ``rows``: those of the member's gradient, by table. If there is not, the gradient must be
        pushed: the ps can still refuse it.
        """
        tables, members = self._shard.tables, len(self.holders)
        return tables is None or all(
            tables.has_room(each.table, members * len(each.ids)) for each in rows
        )

    def offer(
        self,
        examples: int,
        loss: float,
        sums: Sums | None = None,
        absent: Collection[int] = (),
        weight: float | None = None,
    ) -> bool:
        """Offer a gradient of ``examples`` examples with this mean loss; return whether it counts.

        ``sums``: over these examples, of what else was measured, and has room there. ``absent``:
        numbers of variables without a gradient. ``weight``: of gradient and loss; None: the number
        of examples. If it does not count, because the roster is over or the update is not made by
        parts, it must be pushed.
        """
        if self.steps == self._limit or not self._shard.can_update(self.version):
            return False
        before, weight = self._figures, examples if weight is None else weight
        sums = dict(sums or {})
        self._figures = Figures(
            examples=before.examples + examples,
            loss=before.loss + weight * loss,
            last=loss,
            weight=before.weight + weight,
            last_weight=weight,
            sums=added(before.sums, sums) if before.examples else sums,
        )
        buffer = self._buffers[self.place]
        self._board.set_figures(buffer, self.steps + 1, self._figures)
        self._shard.segment.note_absent(buffer, absent)
        made = self._board.swap(self.place, MADE, self._word, self._word + _STEP)
        self._board.wake(self.place, MADE)
        return made

    def missing(self, word: int) -> int:
        """Return a member whose word is not raised in this step, a taken seat first; -1: none."""
        return self._board.behind(word, len(self.holders), self._word + _STEP)

    def wait(self, place: int, word: int, limit_s: float) -> None:
        """Wait at most so long for a member that is missing to raise its word."""
        self._board.wait(place, word, self._word + _STEP, limit_s)

    def is_over(self, place: int) -> bool:
        """Return whether this member will not make its gradient of this step ready.

        Its seat may be taken also after it has.
        """
        value = self._board.value(place, MADE)
        return bool(value & _TAKEN) and value < self._word + _STEP

    def update(self) -> None:
        """Apply all gradients, which are ready, to this member's slice, unless the ps does.

        Raises:
            FencedError: the member was left out, and the roster is over.
        """
        claimed = self._word | _MEMBER
        if self._board.swap(self.place, DONE, self._word, claimed):
            self._write(claimed)
            return
        found = self._board.value(self.place, DONE)
        if found >> _ABOVE != self._number or found == self._word | _NOBODY:
            worker = self.holders[self.place].worker
            raise FencedError(f"worker {worker} was left out of the step that it has computed")

    def finish(self, *, is_dead: bool) -> bool:
        """Do :meth:`Board.finish` for this seat."""
        self._board.swap(self.place, DONE, self._word, self._word | _PS)  # if nobody has claimed it
        found = self._board.value(self.place, DONE)
        if found < self._word + _STEP:
            if found & _WRITER == _MEMBER and not is_dead:
                return False
            self._write(found)
        return True

    def _write(self, claimed: int) -> None:
        """Update the slice, or finish that, by the claim that its word DONE shows."""
        swap, begun = self._board.swap, claimed | _BEGUN
        if claimed != begun:
            self._own.begin()
            swap(self.place, DONE, claimed, begun)
        else:
            self._own.repair()
        weights = self._board.weights(self._buffers, self.steps + 1)
        self._own.update(self._shard.step_of(self._buffers, weights, self.version))
        swap(self.place, DONE, begun, self._word + _STEP)
        self._board.wake(self.place, DONE)

    def end_step(self) -> int:
        """The step is made; return the batch that this member is given with it."""
        batch: int = self._next_batch + self.steps * len(self.holders) + self.place
        self.steps += 1
        return batch

    @property
    def _word(self) -> int:
        """The member's words after the steps that are made."""
        return self._number << _ABOVE | _STEP * self.steps
