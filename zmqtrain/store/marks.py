"""Each worker's last request and answer, in the segment of a shard: so an update counts once.

A worker's mark is one row. Writing it can be interrupted anywhere, so each part has a word that is
written last and makes it valid: ``incarnation`` for its identity, ``received`` for its last
push, ``answered`` for its last answer.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from zmqtrain.store.segment import Segment
from zmqtrain.store.segment_layout import MARK_NBYTES, MAX_WORKERS

INCARNATION, RECEIVED, ANSWERED, RESULT, BUFFER, LANE, STAGED, RELEASED = range(8)
_WORDS = 8
_PUSH = struct.Struct("<qqqdq")  # version, batch, examples, loss, finite
_PUSH_AT = 8 * _WORDS
_TEXTS = {"who": (_PUSH_AT + _PUSH.size, 384), "answer": (512, 512)}
_SIZE = struct.Struct("<q")

Result: TypeAlias = Literal["", "applied", "accumulated", "dropped", "refused"]
"""What became of a push; "": nothing yet."""
RESULTS: tuple[Result, ...] = get_args(Result)
LANES = ("tcp", "shm", "memory")


@dataclass(frozen=True, slots=True)
class Mark:
    """A worker as its shard last knew it.

    ``released`` is the last push whose release was ordered before the push had arrived.
    ``staged`` is the buffer of its push ``received``, which may still be needed when the worker
    is gone (``incarnation`` 0). ``who`` and ``answer`` are the writer's own bytes, empty if they
    were too long.
    """

    worker: int
    incarnation: int
    received: int
    answered: int
    released: int
    result: Result  # of push received
    buffer: int
    lane: str
    staged: int
    version: int
    batch: int
    examples: int
    loss: float
    finite: bool
    who: bytes
    answer: bytes


class Marks:
    """The marks of one segment. Workers beyond ``MAX_WORKERS`` leave none."""

    def __init__(self, segment: Segment) -> None:
        self._memory = segment.marks
        self._words = segment.marks.cast("q")

    def clear(self) -> None:
        """Forget every worker."""
        for worker in range(MAX_WORKERS):
            row = self._row(worker)
            if self._words[row + INCARNATION] or self._words[row + STAGED]:
                self._words[row + INCARNATION] = self._words[row + STAGED] = 0

    def join(self, worker: int, incarnation: int, who: bytes) -> None:
        """A new life of a worker begins. What the one before has staged stays."""
        if worker >= MAX_WORKERS:
            return
        row = self._row(worker)
        self._words[row + INCARNATION] = 0
        self._words[row + RECEIVED] = self._words[row + ANSWERED] = -1
        self._words[row + RELEASED] = -1
        self._words[row + BUFFER] = -1
        self._words[row + LANE] = 0
        self._put(worker, "who", who)
        self._words[row + INCARNATION] = incarnation

    def seat(self, worker: int, buffer: int, lane: str) -> None:
        """Note the buffer of a worker's gradients, and its lane."""
        if worker < MAX_WORKERS:
            row = self._row(worker)
            self._words[row + BUFFER] = buffer
            self._words[row + LANE] = LANES.index(lane)

    def receive(
        self,
        worker: int,
        sequence: int,
        staged: int = -1,
        push: tuple[int, int, int, float, bool] = (0, -1, 0, 0.0, True),
    ) -> None:
        """A push has arrived, in buffer ``staged``; or a pull, sequence 0.

        ``push``: its version, batch, examples, loss, and whether it is finite.
        """
        if worker >= MAX_WORKERS:
            return
        row, words = self._row(worker), self._words
        _PUSH.pack_into(self._memory, 8 * row + _PUSH_AT, *push)
        words[row + RESULT] = 0
        if staged >= 0:
            words[row + STAGED] = staged + 1
        words[row + RECEIVED] = sequence

    def note_result(self, worker: int, sequence: int, result: Result) -> None:
        """Note the result of a push, unless the worker has sent another since."""
        if worker < MAX_WORKERS:
            row = self._row(worker)
            if self._words[row + RECEIVED] == sequence:
                self._words[row + RESULT] = RESULTS.index(result)

    def answer(self, worker: int, sequence: int, answer: bytes) -> None:
        """Note the answer to a worker."""
        if worker < MAX_WORKERS:
            self._put(worker, "answer", answer)
            self._words[self._row(worker) + ANSWERED] = sequence

    def note_early_release(self, worker: int, sequence: int) -> None:
        """Note a release after a push that has not arrived yet."""
        if worker < MAX_WORKERS:
            self._words[self._row(worker) + RELEASED] = sequence

    def leave(self, worker: int) -> None:
        """A worker is gone; what it has staged stays."""
        if worker < MAX_WORKERS:
            self._words[self._row(worker) + INCARNATION] = 0

    def read(self) -> Iterator[Mark]:
        """Yield the marks of workers that are live or still have a gradient staged."""
        for worker in range(MAX_WORKERS):
            row, words = self._row(worker), self._words
            if not words[row + INCARNATION] and not words[row + STAGED]:
                continue
            version, batch, examples, loss, finite = _PUSH.unpack_from(
                self._memory, 8 * row + _PUSH_AT
            )
            yield Mark(
                worker,
                words[row + INCARNATION],
                words[row + RECEIVED],
                words[row + ANSWERED],
                words[row + RELEASED],
                RESULTS[words[row + RESULT]],
                words[row + BUFFER],
                LANES[words[row + LANE]],
                words[row + STAGED] - 1,
                version,
                batch,
                examples,
                loss,
                bool(finite),
                self._text(worker, "who"),
                self._text(worker, "answer"),
            )

    def _row(self, worker: int) -> int:
        return worker * MARK_NBYTES // 8

    def _put(self, worker: int, name: str, data: bytes) -> None:
        at, limit = _TEXTS[name]
        at += worker * MARK_NBYTES
        if len(data) > limit - _SIZE.size:
            data = b""
        _SIZE.pack_into(self._memory, at, len(data))
        at += _SIZE.size
        self._memory[at : at + len(data)] = data

    def _text(self, worker: int, name: str) -> bytes:
        at = _TEXTS[name][0] + worker * MARK_NBYTES
        (size,) = _SIZE.unpack_from(self._memory, at)
        return bytes(self._memory[at + _SIZE.size :][:size])
