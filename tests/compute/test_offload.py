"""Choice of the work that goes to a thread, by measured durations."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.clock import Clock, StopClock
from tests.limits import within
from zmqtrain.compute import offload as offload_module
from zmqtrain.compute.offload import LONG_S, Offload

SHORT_S = LONG_S / 2


@pytest.fixture
def clock(stop_clock: StopClock) -> Clock:
    return stop_clock(offload_module)


@pytest.fixture
def offload(clock: Clock) -> Iterator[Offload]:
    offload = Offload("compute")
    yield offload
    offload.close()


@pytest.fixture
def chunk(offload: Offload, clock: Clock) -> Callable[[float], Any]:
    """Do a chunk of work that takes so long; return whether it had a thread of its own."""

    async def run(duration_s: float) -> bool:
        def work() -> str:
            clock.now += duration_s
            return threading.current_thread().name

        name: str = await within(offload.run(work))
        return name.startswith("compute")

    return run


async def test_work_moves_to_where_the_last_piece_would_have_belonged(
    chunk: Callable[[float], Any],
) -> None:
    durations = [SHORT_S, SHORT_S, 2 * LONG_S, 2 * LONG_S, SHORT_S, SHORT_S]
    in_thread = [await chunk(duration_s) for duration_s in durations]
    assert in_thread == [True, False, False, True, True, False]


@pytest.mark.parametrize("duration_s", [SHORT_S, 2 * LONG_S])
async def test_error_of_the_work_is_raised_and_measured_too(
    offload: Offload, clock: Clock, chunk: Callable[[float], Any], duration_s: float
) -> None:
    def fails() -> None:
        clock.now += duration_s
        raise ValueError("shapes differ")

    for _ in range(2):
        with pytest.raises(ValueError, match="shapes differ"):
            await within(offload.run(fails))
    assert await chunk(SHORT_S) is (duration_s > LONG_S)


async def test_loop_stays_free_while_work_runs(offload: Offload) -> None:
    may_end = threading.Event()
    task = asyncio.get_running_loop().create_task(offload.run(may_end.wait))
    await asyncio.sleep(0)
    assert not task.done()
    may_end.set()
    assert await within(task) is True


async def test_short_work_waits_for_what_the_thread_does(
    offload: Offload, chunk: Callable[[float], Any]
) -> None:
    assert [await chunk(SHORT_S), await chunk(SHORT_S)] == [True, False]
    may_end = threading.Event()
    beside = asyncio.get_running_loop().create_task(offload.run_in_thread(may_end.wait))
    await asyncio.sleep(0)
    after = asyncio.get_running_loop().create_task(chunk(SHORT_S))
    await asyncio.sleep(0)
    assert not after.done()
    may_end.set()
    assert await within(beside) is True
    assert await within(after) is True
    assert await chunk(SHORT_S) is False  # how long the other work took is no guide


async def test_close_waits_for_the_thread(offload: Offload, chunk: Callable[[float], Any]) -> None:
    await chunk(SHORT_S)
    offload.close()
    assert not any(thread.name.startswith("compute") for thread in threading.enumerate())
