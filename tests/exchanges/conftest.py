"""Every kind of exchange, as the training loop sees it: in a running job, with one worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Literal, TypeAlias

import pytest

from zmqtrain import Job
from zmqtrain.actors.task import JobActor
from zmqtrain.chief.chief import Chief
from zmqtrain.config.cluster import Role
from zmqtrain.config.task import TaskConfig
from zmqtrain.coordination.ledger import Ledger
from zmqtrain.errors import ExitCode
from zmqtrain.exchanges.board import BoardExchange
from zmqtrain.exchanges.local import LocalExchange
from zmqtrain.exchanges.parameter_server import ParameterServerExchange
from zmqtrain.server.server import ParameterServer
from zmqtrain.store.shard import Shard
from zmqtrain.training.exchange import Exchange
from zmqtrain.transport.memory import MemoryTransport

OpenExchange: TypeAlias = Callable[[Job], AbstractAsyncContextManager[Exchange]]
"""Begins a job and yields its only worker's exchange; at the end the worker leaves."""


@asynccontextmanager
async def local(job: Job) -> AsyncIterator[Exchange]:
    (layout,) = job.layouts(1)
    shard = Shard(layout, job.update())
    shard.initialize(layout.flat_of(job.initial_values()))
    exchange = LocalExchange(job, shard, Ledger(), lambda: asyncio.sleep(0))
    yield exchange
    exchange.leave("the test is over")


class Guest(JobActor):
    """A worker's task whose exchange a test uses."""

    def __init__(self, config: TaskConfig, job: Job, transport: MemoryTransport) -> None:
        super().__init__(config, job, transport)
        self.exchange: asyncio.Future[Exchange] = asyncio.get_running_loop().create_future()

    async def main(self) -> int:
        kind = BoardExchange if self.board else ParameterServerExchange
        exchange = kind(self, self.link_all())
        self.exchange.set_result(exchange)
        await self.stopping.wait()
        exchange.leave("the test is over")
        return 0


@asynccontextmanager
async def on_ps(
    job: Job, *, ps: int, lane: Literal["memory", "tcp"], board: bool = False
) -> AsyncIterator[Exchange]:
    transport = MemoryTransport()

    def config(role: Role, index: int = 0) -> TaskConfig:
        addresses = tuple(f"ipc://memory/{shard}" for shard in range(ps))
        return TaskConfig(
            role=role, job="job", index=index, ps=addresses, workers=1, lane=lane, board=board
        )

    guest = Guest(config(Role.WORKER), job, transport)
    chief = Chief(config(Role.CHIEF), job, transport, lambda status: None)
    servers = [ParameterServer(config(Role.PS, index), job, transport) for index in range(ps)]
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        for actor in (*servers, guest, chief):
            group.create_task(actor.run())
        try:
            yield await guest.exchange
        finally:
            guest.stop(0)
            chief.stop(int(ExitCode.INTERRUPTED))
    transport.close()


KINDS: dict[str, OpenExchange] = {
    "local": local,
    "1 ps, in place": partial(on_ps, ps=1, lane="memory"),
    "2 ps, by messages": partial(on_ps, ps=2, lane="tcp"),
    "over the board": partial(on_ps, ps=1, lane="memory", board=True),
}


@pytest.fixture(params=KINDS)
def open_exchange(request: pytest.FixtureRequest) -> OpenExchange:
    return KINDS[request.param]
