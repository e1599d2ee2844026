"""What a killed ps leaves written: journal and marks, interrupted anywhere."""

from __future__ import annotations

import pytest

from zmqtrain.store.journal import Journal
from zmqtrain.store.marks import MAX_MARK_NBYTES, Marks
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


def test_mark_is_replaced_as_a_whole() -> None:
    memory = segment()
    marks = Marks(memory)
    for mark in (b"first", b"", b"a third, longer one", b"4th"):
        assert marks.write(3, mark)
        assert list(Marks(memory).read()) == [(3, mark)]
    marks.clear()
    assert list(marks.read()) == []


def test_killed_while_it_writes_a_mark_leaves_the_one_before() -> None:
    memory = segment()
    marks = Marks(memory)
    marks.write(0, b"before")
    words = memory.marks.cast("q")
    marks._words = DyingWords(words, 0)  # type: ignore[assignment]
    with pytest.raises(Killed):
        marks.write(0, b"after it")
    assert list(Marks(memory).read()) == [(0, b"before")]


def test_mark_that_is_too_long_is_not_written() -> None:
    marks = Marks(segment())
    assert marks.write(MAX_WORKERS - 1, b"x" * MAX_MARK_NBYTES)
    assert not marks.write(MAX_WORKERS - 1, b"y" * (MAX_MARK_NBYTES + 1))
    assert list(marks.read()) == [(MAX_WORKERS - 1, b"x" * MAX_MARK_NBYTES)]
