from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from zmqtrain.config.cluster import Role, Task
from zmqtrain.coordination.membership import Peer, PeerTable
from zmqtrain.optim import SGD, Rule, Update
from zmqtrain.server.state import PendingPush, ShardState
from zmqtrain.store.layout import Variable
from zmqtrain.store.marks import Marks
from zmqtrain.store.placement import place
from zmqtrain.store.segment import Segment
from zmqtrain.store.shard import Shard, segment_layout

SIZE = 8


def make_state(index: int = 0, rule: Rule | None = None) -> ShardState:
    """Return shard ``index`` of two, of a job that has begun: all its parameters are 0."""
    layout = place([Variable("w", (2 * SIZE,))], 2, partition_nbytes=4 * SIZE)[index]
    update = Update(rule or SGD(1.0), fused=False)
    segment = Segment.private(segment_layout(layout, update))
    state = ShardState(Task(Role.PS, index), Shard(layout, update, segment), Marks(segment))
    state.shard.initialize(np.zeros(layout.size, np.float32))
    state.generation = 1
    return state


def add_worker(peers: PeerTable, index: int = 0, **fields: object) -> Peer:
    """Let a worker in, whose life is number 1."""
    nobody = None
    peer = Peer(("worker", index), 1, "nonce/1", "host:1", "", "", nobody, time.monotonic())
    for name, value in fields.items():
        setattr(peer, name, value)
    peers.restore(peer)
    return peer


def add_push(state: ShardState, sequence: int, request: object = None) -> PendingPush:
    """Have a push of worker 0, whose gradient is all 1, lie ready."""
    state.shard.segment.gradient(0)[:] = 1
    state.shard.stage(0, 0, sequence)
    pending = PendingPush(1, request, sequence, 0, 0, 1, 0.5, True)  # type: ignore[arg-type]
    state.pending[0] = pending
    return pending


@pytest.fixture
def peers() -> PeerTable:
    return PeerTable(5.0, 2, lambda peer: False)


@pytest.fixture
def within() -> Callable[[Any], Any]:
    """Await with a limit, so that a test that would hang fails."""

    async def wait(awaitable: Any) -> Any:
        async with asyncio.timeout(10):
            return await awaitable

    return wait
