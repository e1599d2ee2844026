"""A ps alone, in this process."""

from __future__ import annotations

import asyncio

import pytest

from zmqtrain import Job
from zmqtrain.config.cluster import Role
from zmqtrain.config.task import TaskConfig
from zmqtrain.data import NoisyLine
from zmqtrain.models import LinearRegression
from zmqtrain.optim import SGD, Update
from zmqtrain.server.server import ParameterServer
from zmqtrain.store.shard import Shard
from zmqtrain.transport.memory import MemoryTransport

LIMIT_S = 30.0  # to compile on a busy machine


async def test_ps_changes_to_compiled_kernels_while_it_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bind = Shard.bind
    bound: asyncio.Future[tuple[Shard, Update]] = asyncio.get_running_loop().create_future()

    def bind_and_tell(shard: Shard, update: Update) -> None:
        bind(shard, update)
        bound.set_result((shard, update))

    monkeypatch.setattr(Shard, "bind", bind_and_tell)
    job = Job(model=LinearRegression(), data=NoisyLine(), optimizer=SGD(0.1))
    config = TaskConfig(
        role=Role.PS, job="job.py", ps=("ipc://memory/0",), workers=1, lane="memory"
    )
    ps = ParameterServer(config, job, MemoryTransport())
    async with asyncio.TaskGroup() as group:
        running = group.create_task(ps.run())
        async with asyncio.timeout(LIMIT_S):
            shard, update = await bound
        assert not running.done()
        running.cancel()
    assert shard is ps.state.shard
    assert (shard.rule.fused, update.fused) == (False, True)
    assert update == job.update()
