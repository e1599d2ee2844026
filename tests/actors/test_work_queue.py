"""Work in order, on the loop or beside it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from zmqtrain.actors.work_queue import WorkQueue

LOOP = threading.main_thread().name
Within = Callable[[Any], Any]


class Log:
    """What was done, and in which thread."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, str]] = []
        self.errors: list[Exception] = []
        self.failed = asyncio.Event()

    def note(self, name: str) -> Callable[[], None]:
        return lambda: self.entries.append((name, threading.current_thread().name))

    def on_error(self, error: Exception) -> None:
        self.errors.append(error)
        self.failed.set()

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.entries]


def fails() -> None:
    raise ValueError("singular matrix")


@pytest.fixture
async def log() -> Log:
    return Log()


@pytest.fixture
def make(log: Log) -> Iterator[Callable[[bool], WorkQueue]]:
    queues = []

    def queue(long_work: bool) -> WorkQueue:
        queues.append(WorkQueue("apply", long_work=long_work, on_error=log.on_error))
        return queues[-1]

    yield queue
    for made in queues:
        made.close()


Make = Callable[[bool], WorkQueue]


async def finish(queue: WorkQueue) -> None:
    done = asyncio.Event()
    queue.add(done.set)
    async with asyncio.timeout(10):
        await done.wait()


async def test_short_work_is_done_when_add_returns(make: Make, log: Log) -> None:
    queue = make(False)
    queue.add(log.note("then 0"))
    queue.add(log.note("then 1"), log.note("work 1"))
    assert log.entries == [("then 0", LOOP), ("work 1", LOOP), ("then 1", LOOP)]


async def test_long_work_runs_beside_the_loop_and_what_follows_on_it(make: Make, log: Log) -> None:
    queue = make(True)
    queue.add(log.note("then"), log.note("work"))
    assert "then" not in log.names
    await finish(queue)
    (work, worker), (then, loop) = log.entries
    assert (work, then, loop) == ("work", "then", LOOP)
    assert worker.startswith("apply")


@pytest.mark.parametrize("long_work", [False, True])
async def test_pieces_are_done_in_the_order_they_were_added(
    make: Make, log: Log, long_work: bool
) -> None:
    queue = make(long_work)
    expected = []
    for number in range(50):
        work = None if number % 3 == 0 else log.note(f"work {number}")
        queue.add(log.note(f"then {number}"), work)
        expected += [f"then {number}"] if work is None else [f"work {number}", f"then {number}"]
    await finish(queue)
    assert log.names == expected


@pytest.mark.parametrize("long_work", [False, True])
async def test_piece_added_by_a_piece_comes_after_those_before_it(
    make: Make, log: Log, long_work: bool
) -> None:
    queue = make(long_work)

    def then() -> None:
        queue.add(log.note("added later"), log.note("work of added later"))
        log.note("first")()

    queue.add(then, log.note("work of first"))
    queue.add(log.note("second"))
    await finish(queue)
    await finish(queue)
    after = ["added later", "second"] if not long_work else ["second", "added later"]
    assert [name for name in log.names if "work" not in name] == ["first", *after]


async def test_loop_stays_free_while_long_work_runs(make: Make, log: Log, within: Within) -> None:
    queue = make(True)
    began, may_end = threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        may_end.wait()

    queue.add(log.note("long"), work)
    queue.add(log.note("after"))
    await within(asyncio.to_thread(began.wait))
    assert log.names == []
    may_end.set()
    await finish(queue)
    assert log.names == ["long", "after"]


@pytest.mark.parametrize("part", ["work", "then"])
async def test_failed_long_piece_is_told_and_the_next_is_done(
    make: Make, log: Log, part: str
) -> None:
    queue = make(True)
    if part == "work":
        queue.add(log.note("then"), fails)
    else:
        queue.add(fails, log.note("work"))
    queue.add(log.note("next"))
    await finish(queue)
    assert [str(error) for error in log.errors] == ["singular matrix"]
    assert log.names == (["next"] if part == "work" else ["work", "next"])


async def test_failed_short_piece_behind_a_long_one_is_told_and_the_next_is_done(
    make: Make, log: Log, within: Within
) -> None:
    queue = make(True)
    queue.add(log.note("long"), log.note("work"))
    queue.add(fails)
    queue.add(log.note("next"))
    await within(log.failed.wait())
    await finish(queue)
    assert [str(error) for error in log.errors] == ["singular matrix"]
    assert log.names == ["work", "long", "next"]


@pytest.mark.parametrize("part", ["work", "then"])
async def test_failed_short_piece_is_the_error_of_add_and_the_next_is_done(
    make: Make, log: Log, part: str
) -> None:
    queue = make(False)
    with pytest.raises(ValueError, match="singular matrix"):
        if part == "work":
            queue.add(log.note("then"), fails)
        else:
            queue.add(fails)
    queue.add(log.note("next"), log.note("work"))
    assert log.names == ["work", "next"]


async def test_closed_queue_does_nothing_more(make: Make, log: Log, within: Within) -> None:
    queue = make(True)
    began, may_end = threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        may_end.wait()
        log.note("work")()

    queue.add(log.note("then"), work)
    queue.add(log.note("next"), log.note("next work"))
    await within(asyncio.to_thread(began.wait))
    may_end.set()
    queue.close()
    await within(asyncio.to_thread(lambda: None))
    assert log.names == ["work", "then"]
    assert log.errors == []
    assert not any(thread.name.startswith("apply") for thread in threading.enumerate())
