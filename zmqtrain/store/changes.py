"""Changes of a shard, and the note by which one that was interrupted is finished.

A change is noted in the segment before the first element is changed, and its gradients stay in
their buffers until it is made. If the process is killed meanwhile, the next one that adopts the
segment reads the note and makes the rest, with the same bits. Nothing is written to a disk: the
note survives the process, not the host.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import NamedTuple

from zmqtrain.store.segment import Segment

UPDATE, ACCUMULATE = 1, 2
"""Kinds of changes: of parameters and slots; of the sum."""

_HEAD = 8  # words before the contributions
_CLIP = 7


class Contribution(NamedTuple):
    """A gradient buffer of the segment, the worker and push that filled it, and its examples.

    The buffer holds the mean gradient of these examples.
    """

    buffer: int
    worker: int
    sequence: int
    examples: int


@dataclass(slots=True)
class Change:
    """One change of a shard: all that another process needs to finish it."""

    kind: int
    contributions: tuple[Contribution, ...]
    examples: int  # of all gradients that are averaged, or that are in the sum after it
    unit: int  # examples of a gradient that has weight 1
    step: int  # version before
    with_sum: bool = False  # the sum is part of the update, or is added to instead of begun
    clip: float = 1.0  # factor of the mean, which limits its norm
    order: int = 0  # carried out by it, 0: none


class Note:
    """The note of a segment's last change.

    It is int64 words: state, examples, unit, step, whether the sum is part of it, order, number of
    contributions, the bits of the factor that clips, and for each contribution buffer, worker,
    sequence, examples. The state is 0 while nothing is noted, the kind of a change that is made,
    and its negative until then.
    """

    def __init__(self, segment: Segment) -> None:
        self._words = segment.change
        self._floats = segment.change.cast("B").cast("d")

    def write(self, change: Change) -> None:
        """Note that a change begins: from here on another process would finish it."""
        values = [change.examples, change.unit, change.step, change.with_sum, change.order]
        values += [len(change.contributions), 0]
        for contribution in change.contributions:
            values += contribution
        words = self._words
        words[0] = 0
        words[1 : 1 + len(values)] = memoryview(array("q", values))
        self._floats[_CLIP] = change.clip
        words[0] = -change.kind

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
        state, examples, unit, step, with_sum, order, contributions = words[:_CLIP]
        if not state:
            return None
        at = range(_HEAD, _HEAD + 4 * contributions, 4)
        given = tuple(Contribution(*words[place : place + 4]) for place in at)
        more = bool(with_sum), self._floats[_CLIP], order
        return Change(abs(state), given, examples, unit, step, *more)
