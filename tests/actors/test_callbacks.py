"""Callbacks of the event loop: an error in one is an actor's end, not a line that nobody reads."""

from __future__ import annotations

import asyncio

import pytest

from zmqtrain.actors.actor import Actor, guarded
from zmqtrain.config.cluster import Role, Task
from zmqtrain.config.timing import Timing
from zmqtrain.observe.metrics import Metrics
from zmqtrain.transport.memory import MemoryTransport


class Waiting(Actor):
    def __init__(self) -> None:
        super().__init__(Task(Role.PS, 0), MemoryTransport(), Metrics("ps"), Timing())

    async def main(self) -> int:
        asyncio.get_running_loop().call_soon(guarded(self._fail, self.crash), "a bug")
        await self.stopping.wait()
        return 0

    def _fail(self, text: str) -> None:
        raise OverflowError(text)


async def test_error_of_a_callback_ends_its_actor() -> None:
    with pytest.raises(OverflowError, match="a bug"):
        await Waiting().run()
