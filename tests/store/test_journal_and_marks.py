"""What a killed ps leaves written: journal and marks, interrupted anywhere."""

from __future__ import annotations

from typing import Any

import pytest

from zmqtrain.store.journal import Journal
from zmqtrain.store.marks import Marks
from zmqtrain.store.segment import Segment
from zmqtrain.store.segment_layout import (
    JOURNAL_NBYTES,
    JOURNAL_ROOM_NBYTES,
    MAX_WORKERS,
    SegmentLayout,
)


def segment() -> Segment:
    return Segment.private(SegmentLayout(1, ()))


def test_journal_gives_back_its_state_and_what_came_after() -> None:
    memory = segment()
    journal = Journal(memory)
    assert Journal(memory).read() == []
    for state in (b"first", b"", b"third"):
        assert journal.begin(state)
        for entry in (b"a", b"", b"bc"):
            assert journal.append(entry)
        assert Journal(memory).read() == [state, b"a", b"", b"bc"]


def test_full_journal_takes_no_more_and_loses_nothing() -> None:
    memory = segment()
    journal = Journal(memory)
    journal.begin(b"state")
    entries = 0
    while journal.append(b"x" * 1000):
        entries += 1
    assert entries == (JOURNAL_ROOM_NBYTES - 13) // 1008
    assert len(Journal(memory).read()) == 1 + entries
    assert not journal.begin(b"x" * JOURNAL_NBYTES)
    assert len(Journal(memory).read()) == 1 + entries


def test_journal_has_as_much_room_for_entries_as_a_large_state_took() -> None:
    journal = Journal(segment())
    state = b"x" * (JOURNAL_NBYTES // 2)
    assert journal.begin(state)
    assert journal.append(b"x" * (len(state) - 100))
    assert not journal.append(b"x" * 100)


class Killed(BaseException):
    pass


class DyingWords:
    """Words of a segment in a process that is killed before the given write."""

    def __init__(self, words: memoryview, left: int) -> None:
        self._words, self._left = words, left

    def __getitem__(self, place: int) -> int:
        return int(self._words[place])

    def __setitem__(self, place: int, value: int) -> None:
        if not self._left:
            raise Killed
        self._left -= 1
        self._words[place] = value


def test_killed_while_it_begins_anew_leaves_the_journal_before() -> None:
    for left in range(2):
        memory = segment()
        journal = Journal(memory)
        journal.begin(b"old")
        journal.append(b"entry")
        journal._words = DyingWords(memory.words, left)  # type: ignore[assignment]
        with pytest.raises(Killed):
            journal.begin(b"new")
        assert Journal(memory).read() == [b"old", b"entry"]


PUSH = (7, 3, 100, 0.5, True)


def test_mark_tells_what_was_received_and_answered() -> None:
    memory = segment()
    marks = Marks(memory)
    marks.join(3, 99, b"who")
    marks.seat(3, 2, "shm")
    marks.receive(3, 0)
    marks.answer(3, 0, b"welcome")
    marks.receive(3, 1, 2, PUSH)
    marks.note_result(3, 1, "applied")
    (mark,) = Marks(memory).read()
    assert (mark.worker, mark.incarnation, mark.received, mark.answered) == (3, 99, 1, 0)
    assert (mark.buffer, mark.lane, mark.staged, mark.result) == (2, "shm", 2, "applied")
    assert (mark.version, mark.batch, mark.examples, mark.loss, mark.finite) == PUSH
    assert (mark.who, mark.answer) == (b"who", b"welcome")


def test_result_of_an_earlier_push_is_not_taken_for_that_of_the_last() -> None:
    memory = segment()
    marks = Marks(memory)
    marks.join(0, 1, b"")
    marks.receive(0, 2, 0, PUSH)
    marks.note_result(0, 1, "applied")
    (mark,) = marks.read()
    assert mark.result == ""


def test_worker_that_left_keeps_what_it_staged() -> None:
    memory = segment()
    marks = Marks(memory)
    marks.join(0, 1, b"")
    marks.receive(0, 1, 5, PUSH)
    marks.leave(0)
    (mark,) = marks.read()
    assert (mark.incarnation, mark.staged) == (0, 5)
    marks.clear()
    assert list(marks.read()) == []


@pytest.mark.parametrize("who", [b"x" * 1000, b""])
def test_bytes_too_long_for_a_mark_are_left_out(who: bytes) -> None:
    memory = segment()
    marks = Marks(memory)
    marks.join(MAX_WORKERS - 1, 1, who)
    marks.answer(MAX_WORKERS - 1, 4, b"fits")
    (mark,) = marks.read()
    assert (mark.who, mark.answer, mark.answered) == (b"", b"fits", 4)


def test_workers_beyond_the_room_leave_no_mark() -> None:
    marks = Marks(segment())
    calls: list[tuple[Any, ...]] = [
        (marks.join, 1, b""),
        (marks.seat, 0, "tcp"),
        (marks.receive, 1),
        (marks.note_result, 1, "applied"),
        (marks.answer, 1, b""),
        (marks.leave,),
    ]
    for call, *arguments in calls:
        call(MAX_WORKERS, *arguments)
    assert list(marks.read()) == []


def test_release_of_what_has_not_come_is_kept_for_that_life_alone() -> None:
    marks = Marks(segment())
    told = []
    for incarnation in (1, 2):
        marks.join(0, incarnation, b"")
        told.append([mark.released for mark in marks.read()])
        marks.note_early_release(0, 4)
        told.append([mark.released for mark in marks.read()])
    assert told == [[-1], [4], [-1], [4]]


def test_release_of_a_worker_beyond_the_room_is_not_kept() -> None:
    memory = segment()
    before = bytes(memory.words)
    Marks(memory).note_early_release(MAX_WORKERS, 1)
    assert list(Marks(memory).read()) == []
    assert bytes(memory.words) == before
