"""Every kind of exchange, as the training loop sees it: in a running job, with one worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np
import pytest

from tests.plans import planned
from zmqtrain import Job
from zmqtrain.actors.task import JobActor
from zmqtrain.chief.chief import Chief
from zmqtrain.compute.device import Cpu
from zmqtrain.compute.threads import ThreadTeam
from zmqtrain.config.cluster import Role, Task
from zmqtrain.config.task import TaskConfig
from zmqtrain.coordination.ledger import Ledger
from zmqtrain.errors import ExitCode
from zmqtrain.exchanges import worker
from zmqtrain.exchanges.local import LocalExchange, own_shard
from zmqtrain.planning.exchanges import BOARD
from zmqtrain.planning.plan import Plan
from zmqtrain.server.server import ParameterServer
from zmqtrain.training.exchange import Exchange, Membership
from zmqtrain.training.model_runner import ModelRunner
from zmqtrain.transport.memory import MemoryTransport

OpenExchange: TypeAlias = Callable[[Job], AbstractAsyncContextManager[Exchange]]
"""Begins a job and yields its only worker's exchange; at the end the worker leaves."""


@asynccontextmanager
async def local(job: Job) -> AsyncIterator[Exchange]:
    (layout,) = planned(job).layouts
    shard = own_shard(job, layout)
    shard.initialize(layout.flat_of(job.initial_values()))
    exchange = LocalExchange(job, shard, Ledger(), lambda: asyncio.sleep(0))
    yield exchange
    exchange.leave("the test is over")


class Guest(JobActor):
    """A worker's task whose exchange a test uses."""

    def __init__(self, config: TaskConfig, plan: Plan, transport: MemoryTransport) -> None:
        super().__init__(config, plan, transport)
        self.exchange: asyncio.Future[Exchange] = asyncio.get_running_loop().create_future()

    async def main(self) -> int:
        exchange = worker.open_exchange(self, self.link_all())
        self.exchange.set_result(exchange)
        await self.stopping.wait()
        exchange.leave("the test is over")
        return 0


def guest_of(
    plan: Plan,
    transport: MemoryTransport,
    *,
    lane: Literal["auto", "memory", "tcp"] = "auto",
    far: Collection[int] = (),
) -> tuple[Guest, Chief, list[ParameterServer]]:
    """Return the actors of a job whose only worker is a guest. ``far``: ps that map no memory."""
    config = TaskConfig(role=Role.WORKER, job="job", ps=plan.ps, lane=lane, crash_safe=False)
    elsewhere = config.model_copy(update={"lane": "tcp"})
    servers = [
        ParameterServer(of.of(Task(Role.PS, shard)), plan, transport)
        for shard, of in ((n, elsewhere if n in far else config) for n in range(plan.shards))
    ]
    chief = Chief(config.of(Task(Role.CHIEF, 0)), plan, transport, lambda status: None)
    return Guest(config, plan, transport), chief, servers


@asynccontextmanager
async def on_ps(
    job: Job, *, ps: int, lane: Literal["memory", "tcp"], board: bool = False
) -> AsyncIterator[Exchange]:
    transport = MemoryTransport()
    plan = planned(job, ps=ps)
    if board:  # also under a policy that has come to it by a switch
        plan = replace(plan, exchange=BOARD)
    guest, chief, servers = guest_of(plan, transport, lane=lane)
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


def values(job: Job, membership: Membership) -> dict[str, Any]:
    """Return all variables as the worker has them."""
    found = {v.name: np.empty(v.shape, v.dtype) for v in job.variables()}
    for layout, flat in zip(membership.layouts, membership.parameters, strict=True):
        layout.scatter(flat, found)
    return found


async def each_step(
    job: Job, exchange: Exchange, batch_of: Callable[[int], tuple[Any, ...]]
) -> AsyncIterator[Membership]:
    """Train to the end; yield before every step."""
    membership = await exchange.join()
    runner = ModelRunner(job, Cpu(), ThreadTeam(1), exchange.written)
    runner.bind(membership)
    batches, stop = list(membership.batches), False
    while not stop:
        yield membership
        runner.load_parameters()
        exchange.begin()
        batch, number = batch_of(batches[0]), batches.pop(0)
        report = await asyncio.to_thread(runner.compute, batch, number, len(batch[0]))
        await asyncio.sleep(0)  # what is complete before the push is sent now
        result = await exchange.finish(report)
        batches += result.batches
        stop = result.stop
