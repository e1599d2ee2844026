"""Changes of a shard, and the note by which one that was interrupted is finished.

A change is noted in the segment before the first element is changed, and its gradients stay in
their buffers until it is made. If the process is killed meanwhile, the next one that adopts the
segment reads the note and makes the rest, with the same bits. Nothing is written to a disk: the
note survives the process, not the host.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from struct import Struct
from typing import NamedTuple

import numpy as np

from zmqtrain.compute.arrays import blocks
from zmqtrain.protocol.status import Moves
from zmqtrain.store.layout import ShardLayout
from zmqtrain.store.segment import Segment

UPDATE, ACCUMULATE, SETTLE = 1, 2, 3
"""Kinds of changes: of parameters and slots; of the sum; of the parameters after an update."""

_DOUBLE, _WORD = Struct("<d"), Struct("<q")
_HEAD = 12  # words before the contributions


def word_of(number: float) -> int:
    """Return the bits of a float64 as an int64."""
    return int(_WORD.unpack(_DOUBLE.pack(number))[0])


def float_of(word: int) -> float:
    """Return the float64 with these bits."""
    return float(_DOUBLE.unpack(_WORD.pack(word))[0])


class Contribution(NamedTuple):
    """A gradient buffer of the segment, the worker and push that filled it, and its weight.

    The buffer holds the mean gradient of a batch; see :mod:`zmqtrain.models.weights`.
    """

    buffer: int
    worker: int
    sequence: int
    weight: float


@dataclass(slots=True)
class Change:
    """One change of a shard: all that another process needs to finish it."""

    kind: int
    contributions: tuple[Contribution, ...]
    weight: float  # of all gradients that are averaged, or that are in the sum after it
    unit: float  # by which weights are divided
    step: int  # version before
    with_sum: bool = False  # the sum is part of the update, or is added to instead of begun
    clip: float = 1.0  # factor of the mean, which limits its norm
    order: int = 0  # carried out by it, 0: none
    local_steps: int = 0  # that each contribution is the result of; 0: they are gradients
    rested: int = 0  # RESTED before
    among: int = 0  # workers, if it is the result of one of them; 0: it is of a round
    cycle: int = 0  # see optim/outer.py


class Note:
    """The note of a segment's last change.

    It is int64 words: state, weight, unit, step, whether the sum is part of it, order, number of
    contributions, the factor that clips, its local steps, RESTED before it, among, cycle, and for
    each contribution buffer, worker, sequence, weight; of weights, units and factors the bits. The
    state is 0 if nothing is noted, the kind of a change once it is made, its negative until then.
    """

    def __init__(self, segment: Segment) -> None:
        self._words = segment.change

    def write(self, change: Change) -> None:
        """Note that a change begins: from here on another process would finish it."""
        values = [word_of(change.weight), word_of(change.unit), change.step, change.with_sum]
        values += [change.order, len(change.contributions), word_of(change.clip)]
        values += [change.local_steps, change.rested, change.among, change.cycle]
        for *names, weight in change.contributions:
            values += [*names, word_of(weight)]
        words = self._words
        words[0] = 0
        words[1 : 1 + len(values)] = memoryview(array("q", values))
        words[0] = -change.kind

    def settle(self) -> None:
        """Note that the parameters are changed once more, after the noted update."""
        self._words[0] = -SETTLE

    def finish(self) -> None:
        """Note that the change is made."""
        self._words[0] = abs(self._words[0])

    def forget(self) -> None:
        """Forget the last change: new parameters begin."""
        self._words[0] = 0

    @property
    def is_under_way(self) -> bool:
        """Whether a change has begun and is not finished."""
        return self._words[0] < 0

    def last(self) -> Change | None:
        """Return the last change that was noted."""
        words = self._words
        state, weight, unit, step, with_sum, order, contributions, clip, *others = words[:_HEAD]
        local_steps, rested, among, cycle = others
        if not state:
            return None
        at = range(_HEAD, _HEAD + 4 * contributions, 4)
        each = (words[place : place + 4] for place in at)
        return Change(
            kind=abs(state),
            contributions=tuple(Contribution(a, b, c, float_of(bits)) for a, b, c, bits in each),
            weight=float_of(weight),
            unit=float_of(unit),
            step=step,
            with_sum=bool(with_sum),
            clip=float_of(clip),
            order=order,
            local_steps=local_steps,
            rested=rested,
            among=among,
            cycle=cycle,
        )


def moves_of(
    change: Change, segment: Segment, layout: ShardLayout, *, of_differences: bool
) -> Moves:
    """Return the workers' moves in a round of local steps, in one pass, before it is applied.

    ``of_differences``: the results are what was added to the parameters.
    """
    own, mean, each = layout.owned_trained, 0.0, 0.0
    with np.errstate(all="ignore"):  # parameters that diverge are seen elsewhere
        for block in blocks(own.stop, start=own.start):
            total = np.zeros(block.stop - block.start, np.float32)
            for given in change.contributions:
                moved = segment.gradient(given.buffer)[block]
                if not of_differences:
                    moved = moved - segment.parameters[block]
                share = np.float32(given.weight / change.weight)
                each += float(share * np.dot(moved, moved))
                total += share * moved
            mean += float(np.dot(total, total))
    return Moves(mean, each)
