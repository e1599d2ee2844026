"""The regions of a shard's memory, described here alone.

The regions of a segment follow one another, each from a page boundary on, and of a page at least,
for gradients are locked one by one:

    header        magic, layout version, nonce; then the words that change, named below
    change        the update under way: see changes.py
    board         words of the workers that make steps by themselves: see board.py
    marks         each worker's last request and answer: see journal.py and server/state.py
    journal       what the leader decided: see journal.py
    redo          for each part of the shard, new values of a block of its parameters and of every
                  slot: see optim/redo.py
    missed        int64, shape (2, variables): updates in which each trained variable had no
                  gradient, after an even number of updates and after an odd one; behind it float32,
                  its factor in the update under way, if the rule looks at whole variables (see
                  optim/formula.py), and ABSENT of the sum
    parameters    float32, shape (size,)
    slot NAME     the same shape, for each slot of the update rule, in its order
    sum           the same shape: gradients added up for a step
    gradient 0    the same shape: the gradient of one worker until it is applied; behind it the
                  figures of a worker that makes steps by itself: see board.py; then ABSENT
    gradient 1    ...

ABSENT is uint8 of shape (1 + variables,): 1 for each trained variable that has no gradient, which
is zero then; the first says whether there are any.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

LAYOUT_VERSION = 19  # rises with every change to the regions of a segment
MAGIC = b"zmqtrain"
PAGE = mmap.ALLOCATIONGRANULARITY
FIXED = struct.Struct("<8sII16sQ")  # magic, layout version, rule's slots, nonce, elements

WORDS_AT = 64  # where the words begin: int64, each written atomically, by the ps but for MISSED

(
    CLOCK,  # odd while an update is under way
    VERSION,  # updates applied
    ACCUMULATED,  # weight of the gradients in the sum: the bits of a float64
    GENERATION,  # timeline of the job; 0: the parameters mean nothing yet
    JOB,  # digest of the job for which the ps was started
    ORDERS,  # orders of this generation carried out
    ACKNOWLEDGED,  # orders that all other shards have carried out, as the leader knows
    ALIVE_AT,  # when the ps was last known to live, ms of CLOCK_BOOTTIME
    JOURNAL,  # which half of the journal is valid, 0 or 1
    JOURNAL_END,  # where the entries in half 0 end
    _,  # in half 1
    INCARNATION,  # highest of any life that has joined
    RATE,  # a learning rate in place of the optimizer's: the bits of its negative; 0: none
    MISSED,  # whether a variable had no gradient in some update; members of a board write it, too
    RESTED,  # steps that workers made by themselves, without the optimizer's slots of the shard
) = range(15)
WORDS = 15

PROGRESS_AT = 256  # where, for each part, the two words of redo.py begin, how far it is changed
PROGRESS_STRIDE = 64  # bytes: threads that write the words of two parts share no cache line
COUNT_LIMIT = 1 << 62  # counts that a word and a message have room for are less
MAX_WORKERS = 1024  # workers whose marks a segment has room for
MARK_NBYTES = 2048
CHANGE_NBYTES = 64 << 10
JOURNAL_NBYTES = 4 << 20  # size of each of its halves; what is never written takes no memory
JOURNAL_ROOM_NBYTES = 256 << 10  # bytes that at least fit a half: 8,000 events, replayed in 1 s
SEATS = 64  # workers at most that make steps by themselves
MAX_STEPS = 1 << 28  # the most steps of a roster, after which the ps decides again
IN_FORCE = 1  # word of the board: whether such workers change the shard
BOARD_LINE = 16  # words of its lines, 128 bytes: two workers that write share no cache line
SUMS = 16  # numbers that a step measures at most, beside its loss
NAMES_NBYTES = 256  # size of all names of these sums, in lines
HEAD = 5  # numbers that a member of a board counts, beside those sums

FIGURES = 2 * (HEAD + SUMS + NAMES_NBYTES // 8)
"""Numbers behind a gradient, float64: half after an even number of steps, half after an odd one.
The last of a half are the bytes of names."""


def has_room(names: Collection[str]) -> bool:
    """Return whether a step has room for sums of these names; each fills a line of its own."""
    are_lines = all(name and name.isprintable() for name in names)
    return are_lines and len(names) <= SUMS and len("\n".join(names).encode()) <= NAMES_NBYTES


REDO_SIZE = 65_536  # elements copied at once: with fewer, rules without a kernel are slower
PARTS = 8  # most parts of a shard, changed side by side: memory is seldom faster for more
PART_SIZE = 524_288  # least elements of a part, 2 MiB: for less, waking a thread costs as much


class SegmentLayout:
    """The regions of a segment, or their offsets, in bytes from its start.

    ``size``: elements of the shard. ``slots``: names of the update rule's slots. ``variables``: how
    many are trained. ``state``: how many elements at the end are of state, averaged and other.
    Attribute ``redo_size``: elements that are changed at once, at most.
    """

    words = slice(WORDS_AT, WORDS_AT + 8 * WORDS)
    change = slice(PAGE, PAGE + CHANGE_NBYTES)

    def __init__(
        self, size: int, slots: Sequence[str], variables: int = 0, state: tuple[int, int] = (0, 0)
    ) -> None:
        self.size = size
        self.variables = variables
        self.slots = tuple(slots)
        self.state = state
        self.parts = parts_of(size, state, cut)
        self.redo_size = min(REDO_SIZE, max(size, 1))
        self.stride = _pages(4 * size)
        self.board = _behind(self.change, 8 * BOARD_LINE * (1 + SEATS))
        self.marks = _behind(self.board, MAX_WORKERS * MARK_NBYTES)
        self.journal = _behind(self.marks, 2 * JOURNAL_NBYTES)
        self.redo_at = _pages(self.journal.stop)
        self.missed_at = self.redo_at + _pages(self._redo_stride * len(self.parts))
        self.factors_at = self.missed_at + 8 * 2 * variables
        self.absent_of_sum_at = self.factors_at + 4 * variables
        self.parameters_at = self.missed_at + _pages((8 * 2 + 4 + 1) * variables + 1)
        self.slots_at = {
            name: self.parameters_at + (1 + place) * self.stride
            for place, name in enumerate(self.slots)
        }
        self.sum_at = self.parameters_at + (1 + len(self.slots)) * self.stride
        self.gradients_at = self.sum_at + self.stride
        self.figures_at = -(-size // 2) * 8  # from where a gradient begins
        self.absent_at = self.figures_at + 8 * FIGURES  # from where a gradient begins
        self.gradient_stride = _pages(self.absent_at + 1 + variables)

    def redo_copies_at(self, part: int) -> range:
        """Return where the copies of a part begin: of its parameters, then of every slot."""
        at = self.redo_at + part * self._redo_stride
        return range(at, at + self._redo_stride, 4 * self.redo_size)

    @property
    def _redo_stride(self) -> int:
        return 4 * self.redo_size * (1 + len(self.slots))

    def gradient_at(self, number: int) -> int:
        return self.gradients_at + number * self.gradient_stride

    def nbytes(self, gradients: int) -> int:
        """Return the bytes of a segment with this number of gradients."""
        return self.gradient_at(gradients)


@dataclass(frozen=True, slots=True)
class PartLayout:
    """A run of elements that one thread changes, and how: ``where`` counts from the shard's begin.

    "update": by the update rule. "mean": each becomes the mean of the gradients' values. "first":
    each becomes the first gradient's value.
    """

    where: slice
    how: Literal["update", "mean", "first"]


def parts_of(
    size: int, state: tuple[int, int], cut: Callable[[int], Sequence[slice]]
) -> tuple[PartLayout, ...]:
    """Return the parts of a shard; ``cut`` divides a number of trained elements into parts."""
    averaged, other = size - sum(state), size - state[1]
    parts = [PartLayout(where, "update") for where in cut(averaged)]
    if averaged < other:
        parts.append(PartLayout(slice(averaged, other), "mean"))
    if other < size:
        parts.append(PartLayout(slice(other, size), "first"))
    return tuple(parts)


def cut(size: int) -> tuple[slice, ...]:
    """Return the parts of a shard of ``size`` elements, which differ by two pages at most."""
    count = min(max(size // PART_SIZE, 1), PARTS)
    page = PAGE // 4
    bounds = [min(size * place // count // page * page, size) for place in range(count)]
    return tuple(map(slice, bounds, [*bounds[1:], size]))


def _behind(region: slice, nbytes: int) -> slice:
    """Return the region of this size from the next page on."""
    start = _pages(region.stop)
    return slice(start, start + nbytes)


def _pages(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to whole pages, at least one."""
    return max(1, -(-nbytes // PAGE)) * PAGE
