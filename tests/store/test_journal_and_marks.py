"""Journal and marks of a killed ps, interrupted anywhere."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from tests.kills import dying_at
from zmqtrain.store import journal as journals
from zmqtrain.store.journal import MAX_MARK_NBYTES, Journal, Marks
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


def test_mark_is_replaced_as_a_whole() -> None:
    memory = segment()
    marks = Marks(memory)
    for mark in (b"first", b"", b"a third, longer one", b"4th"):
        assert marks.write(3, mark)
        assert list(Marks(memory).read()) == [(3, mark)]
    marks.clear()
    assert list(marks.read()) == []


def begun(memory: Segment) -> Callable[[], object]:
    journal = Journal(memory)
    journal.begin(b"before")
    return lambda: journal.begin(b"after it")


def appended(memory: Segment) -> Callable[[], object]:
    journal = Journal(memory)
    journal.begin(b"before")
    return lambda: journal.append(b"after it")


def marked(memory: Segment) -> Callable[[], object]:
    marks = Marks(memory)
    marks.write(0, b"before")
    return lambda: marks.write(0, b"after it")


@pytest.mark.parametrize(
    ("write", "before", "after"),
    [
        (begun, [b"before"], [b"after it"]),
        (appended, [b"before"], [b"before", b"after it"]),
        (marked, [(0, b"before")], [(0, b"after it")]),
    ],
)
def test_record_of_a_process_killed_at_any_line_is_the_old_or_the_new_one(
    write: Callable[[Segment], Callable[[], object]], before: list[Any], after: list[Any]
) -> None:
    found = []
    for line in count():
        memory = segment()
        died = dying_at(line, write(memory), [journals.__file__])
        found.append([*Journal(memory).read(), *Marks(memory).read()])
        if not died:
            break
    assert found[-1] == after
    assert found == sorted(found, key=lambda each: each == after)
    assert all(each in (before, after) for each in found)


def test_mark_that_is_too_long_is_not_written() -> None:
    marks = Marks(segment())
    assert marks.write(MAX_WORKERS - 1, b"x" * MAX_MARK_NBYTES)
    assert not marks.write(MAX_WORKERS - 1, b"y" * (MAX_MARK_NBYTES + 1))
    assert list(marks.read()) == [(MAX_WORKERS - 1, b"x" * MAX_MARK_NBYTES)]
