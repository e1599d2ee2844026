"""The event loop in virtual time, and processes that stop and die on it."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from simulation.loop import Process, VirtualLoop, current_process
from zmqtrain.actors.actor import Actor
from zmqtrain.config.cluster import Role, Task
from zmqtrain.config.timing import Timing
from zmqtrain.observe.metrics import Metrics
from zmqtrain.transport.memory import MemoryTransport


@pytest.fixture
def loop() -> Any:
    made = VirtualLoop(Random(0), starts_at=100.0)
    yield made
    made.close()


def test_work_beside_the_loop_takes_time_and_is_done_in_one_go(loop: VirtualLoop) -> None:
    process = Process("worker 0", work_s=2.0)
    began_at: list[float] = []

    async def main() -> int:
        return await asyncio.to_thread(lambda: began_at.append(loop.time()) or 7)

    assert loop.run_until_complete(loop.spawn(process, main())) == 7
    assert began_at == [loop.time()] != [100.0]


def test_wait_for_what_never_comes_is_an_error_and_no_hang(loop: VirtualLoop) -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    waiting = loop.create_task(main())
    with pytest.raises(RuntimeError, match="nothing is left"):
        loop.run_until_complete(waiting)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(waiting)


def test_error_of_a_callback_is_kept(loop: VirtualLoop) -> None:
    loop.call_soon(lambda: 1 // 0)
    loop.run_until_complete(asyncio.sleep(0))
    assert ["ZeroDivisionError" in error for error in loop.errors] == [True]


async def ticking(seen: list[float], loop: VirtualLoop) -> None:
    try:
        while True:
            seen.append(loop.time() - 100)
            await asyncio.sleep(1)
    finally:
        seen.append(-1.0)


def test_stopped_process_catches_up_when_it_is_continued(loop: VirtualLoop) -> None:
    process, seen = Process("worker 0"), []

    async def main() -> None:
        task = loop.spawn(process, ticking(seen, loop))
        await asyncio.sleep(1.5)
        process.is_stopped = True
        await asyncio.sleep(3)
        assert seen == [0.0, 1.0]
        loop.resume(process)
        await asyncio.sleep(2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    loop.run_until_complete(main())
    assert seen == [0.0, 1.0, 4.5, 5.5, -1.0]


def test_dead_process_runs_no_finally_until_it_is_buried(loop: VirtualLoop) -> None:
    process, seen = Process("worker 0"), []

    async def main() -> None:
        task = loop.spawn(process, ticking(seen, loop))
        await asyncio.sleep(0.5)
        process.is_stopped = True
        task.cancel()
        await asyncio.sleep(10)
        assert seen == [0.0]
        loop.resume(process)
        await asyncio.gather(task, return_exceptions=True)

    loop.run_until_complete(main())
    assert seen == [0.0, -1.0]


def test_all_that_a_process_starts_is_part_of_it(loop: VirtualLoop) -> None:
    process, seen = Process("ps 0"), []

    async def child() -> None:
        seen.append(current_process())
        loop.call_later(1, lambda: seen.append(current_process()))

    async def parent() -> None:
        await asyncio.create_task(child())
        await asyncio.sleep(2)

    loop.run_until_complete(loop.spawn(process, parent()))
    assert seen == [process, process]
    assert current_process() is None


def test_doomed_process_dies_in_the_middle_of_its_code(loop: VirtualLoop) -> None:
    """Only lines of zmqtrain's own modules are counted: here those of a list of waits."""
    from zmqtrain.actors.waits import Waits

    process, entered, buried = Process("ps 0"), [], []

    async def life() -> None:
        await asyncio.sleep(1)
        waits = Waits("ps 0")
        for number in range(100):
            waits.begin("worker 0", "")
            entered.append(number)

    def die() -> Callable[[], None]:
        process.is_stopped = True
        return lambda: buried.append(len(entered))

    async def main() -> None:
        task = loop.spawn(process, life())
        await asyncio.sleep(0.5)
        process.die_after(40, die)
        await asyncio.sleep(5)
        loop.resume(process)
        await asyncio.gather(task, return_exceptions=True)

    loop.run_until_complete(main())
    assert buried == [len(entered)]
    assert 0 < len(entered) < 10


def test_coroutine_that_a_process_has_not_begun_dies_with_it(loop: VirtualLoop) -> None:
    class Dying(Actor):
        async def main(self) -> int:
            await asyncio.sleep(1)
            self.spawn(self._work())
            return 0

        async def _work(self) -> None:
            """Whether it is begun depends on when its actor dies."""

    async def main(lines: int) -> None:
        process = Process("ps 0")

        def die() -> Callable[[], None]:
            process.is_stopped = True
            return lambda: None

        actor = Dying(Task(Role.PS, 0), MemoryTransport(), Metrics("ps"), Timing())
        task = loop.spawn(process, actor.run())
        await asyncio.sleep(0.5)
        process.die_after(lines, die)
        await asyncio.sleep(5)
        process.spare()
        loop.resume(process)
        await asyncio.gather(task, return_exceptions=True)

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for lines in range(12):
            loop.run_until_complete(main(lines))
        gc.collect()
    assert not [str(warning.message) for warning in warned]
