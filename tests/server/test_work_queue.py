"""Work in order, on the loop or beside it; which of them is measured."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.clock import Clock, StopClock
from tests.limits import within
from zmqtrain.errors import ConfigError
from zmqtrain.server import work_queue as work_queue_module
from zmqtrain.server.work_queue import LONG_S, WorkQueue

Make = Callable[[bool], Any]


class Log:
    """Work done, with the thread that did it."""

    def __init__(self, clock: Clock) -> None:
        self.entries: list[tuple[str, str]] = []
        self.errors: list[Exception] = []
        self.failed = asyncio.Event()
        self.duration_s = 0.0  # of everything that is done
        self._clock = clock

    def note(self, name: str, duration_s: float | None = None) -> Callable[[], None]:
        """Return what takes so long, or as long as everything, and is noted."""

        def work() -> None:
            self._clock.now += self.duration_s if duration_s is None else duration_s
            self.entries.append((name, threading.current_thread().name))

        return work

    def on_error(self, error: Exception) -> None:
        self.errors.append(error)
        self.failed.set()

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.entries]

    @property
    def beside(self) -> list[str]:
        """Work done in the queue's thread."""
        return [name for name, thread in self.entries if thread.startswith("apply")]


def fails() -> None:
    raise ValueError("singular matrix")


def refuses() -> None:
    raise ConfigError("no learning rate")


def do(
    queue: WorkQueue,
    then: Callable[[], None],
    work: Callable[[], None] | None = None,
    *,
    rare: bool = False,
) -> None:
    queue.put(work, lambda _: then(), rare=rare)
    queue.run()


@pytest.fixture
def clock(stop_clock: StopClock) -> Clock:
    return stop_clock(work_queue_module)


@pytest.fixture
async def log(clock: Clock) -> Log:
    return Log(clock)


@pytest.fixture
async def make(log: Log, clock: Clock) -> AsyncIterator[Make]:
    """Make queues whose work is long, or short, as they have seen."""
    queues = []

    async def queue(long_work: bool) -> WorkQueue:
        queues.append(WorkQueue("apply", on_error=log.on_error))
        log.duration_s = 2 * LONG_S if long_work else LONG_S / 2
        do(queues[-1], lambda: None, log.note("first"))
        await finish(queues[-1])
        log.entries.clear()
        return queues[-1]

    yield queue
    for made in queues:
        made.close()


async def finish(queue: WorkQueue) -> None:
    done = asyncio.Event()
    do(queue, done.set)
    async with asyncio.timeout(10):
        await done.wait()


@pytest.mark.parametrize(
    ("first", "then", "work", "done"),
    [(None, "then", fails, []), (None, fails, "work", ["work"]), ("long", fails, None, ["long"])],
    ids=["long work", "after long work", "short, behind long work"],
)
async def test_failure_in_turn_is_reported_and_nothing_later_is_done(
    make: Make, log: Log, first: str | None, then: Any, work: Any, done: list[str]
) -> None:
    def noted(part: Any) -> Any:
        return log.note(part) if isinstance(part, str) else part

    queue = await make(True)
    if first:
        do(queue, lambda: None, log.note(first))
    do(queue, noted(then), noted(work))
    do(queue, log.note("next"), log.note("next work"))
    await within(log.failed.wait())
    do(queue, log.note("later"), log.note("later work"), rare=True)
    queue.close()
    await asyncio.sleep(0)
    assert [str(error) for error in log.errors] == ["singular matrix"]
    assert log.names == done


@pytest.mark.parametrize(
    ("work", "then", "error"),
    [(fails, fails, ValueError), (None, fails, ValueError), (None, refuses, ConfigError)],
)
async def test_failure_of_a_short_piece_is_reported_and_nothing_later_is_done(
    make: Make, log: Log, work: Any, then: Any, error: type
) -> None:
    queue = await make(False)
    queue.put(None, lambda _: log.note("before")())
    queue.put(work, lambda _: then())
    queue.put(None, lambda _: log.note("next")(), lasting=True)
    queue.run()
    do(queue, log.note("later"), log.note("work"))
    assert log.names == ["before"]
    assert [type(each) for each in log.errors] == [error]


async def test_failure_of_work_that_ends_after_the_queue_was_closed_is_reported(
    make: Make, log: Log
) -> None:
    queue = await make(True)
    began, may_fail = threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        may_fail.wait()
        fails()

    do(queue, log.note("then"), work)
    await within(asyncio.to_thread(began.wait))
    may_fail.set()
    queue.close()
    await within(log.failed.wait())
    assert [str(error) for error in log.errors] == ["singular matrix"]
    assert log.names == []


async def test_closed_queue_does_nothing_more(make: Make, log: Log) -> None:
    queue = await make(True)
    began, may_end = threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        may_end.wait()
        log.note("work")()

    do(queue, log.note("then"), work)
    do(queue, log.note("next"), log.note("next work"))
    await within(asyncio.to_thread(began.wait))
    may_end.set()
    queue.close()
    await within(asyncio.to_thread(lambda: None))
    assert log.names == ["work"]
    assert log.errors == []
    assert not any(thread.name.startswith("apply") for thread in threading.enumerate())


async def test_piece_goes_where_the_last_one_would_have_belonged(log: Log, clock: Clock) -> None:
    queue = WorkQueue("apply", on_error=log.on_error)
    short_s, long_s = LONG_S / 2, LONG_S * 2
    for number, duration_s in enumerate([short_s, short_s, long_s, long_s, short_s, short_s]):
        do(queue, lambda: None, log.note(f"{number}", duration_s))
        await finish(queue)
    queue.close()
    assert log.names == list("012345")
    assert log.beside == ["0", "3", "4"]


@pytest.mark.parametrize("long_work", [False, True])
async def test_refusal_of_work_is_what_follows_it_is_given(make: Make, long_work: bool) -> None:
    queue = await make(long_work)
    outcomes: list[Any] = []
    queue.put(lambda: 7, outcomes.append)
    queue.put(refuses, outcomes.append)
    queue.run()
    await finish(queue)
    assert outcomes[0] == 7
    assert isinstance(outcomes[1], ConfigError)


@pytest.mark.parametrize("long_work", [False, True])
async def test_rare_work_is_done_beside_the_loop_and_tells_nothing_of_the_rest(
    make: Make, log: Log, long_work: bool
) -> None:
    queue = await make(long_work)
    for number, duration_s in enumerate([0.0, 100 * LONG_S, 0.0]):
        do(queue, log.note(f"then {number}"), log.note(f"rare {number}", duration_s), rare=True)
        do(queue, log.note("after"), log.note(f"usual {number}"))
        await finish(queue)
    usual = [f"usual {number}" for number in range(3)]
    rare = [f"rare {number}" for number in range(3)]
    assert [name for name in log.beside if name in usual] == (usual if long_work else [])
    assert [name for name in log.beside if name in rare] == rare
    assert [name for name in log.names if "rare" in name or "usual" in name] == [
        name for pair in zip(rare, usual, strict=True) for name in pair
    ]


CHUNKS = st.lists(
    st.tuples(
        st.sampled_from(["none", "short", "long", "rare"]),
        st.integers(0, 2),  # chunks that its end adds
        st.booleans(),  # whether the loop has a turn before the next is added
    ),
    max_size=25,
)


@settings(max_examples=60)
@given(chunks=CHUNKS)
def test_every_piece_is_done_once_and_in_order(chunks: list[tuple[str, int, bool]]) -> None:
    clock = Clock()
    added: list[str] = []
    done: list[str] = []

    def add(queue: WorkQueue, kind: str, more: int = 0) -> None:
        number = len(added)
        added.append(kind)

        def work() -> None:
            clock.now += 2 * LONG_S if kind == "long" else 0.0
            done.append(f"work {number}")

        def then() -> None:
            done.append(f"then {number}")
            for _ in range(more):
                add(queue, "short")

        do(queue, then, None if kind == "none" else work, rare=kind == "rare")

    async def play() -> None:
        queue = WorkQueue("apply", on_error=lambda error: done.append(str(error)))
        for kind, more, pause in chunks:
            add(queue, kind, more)
            if pause:
                await asyncio.sleep(0)
        await finish(queue)
        await finish(queue)  # what the last of them added
        queue.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(work_queue_module, "time", clock)
        asyncio.run(play())
    expected = [
        f"{part} {number}"
        for number, kind in enumerate(added)
        for part in (["then"] if kind == "none" else ["work", "then"])
    ]
    assert done == expected
