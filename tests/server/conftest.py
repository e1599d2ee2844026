from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from zmqtrain.actors.actor import Request
from zmqtrain.config.cluster import Role, Task
from zmqtrain.coordination.peers import PeerTable
from zmqtrain.optim import SGD, Rule, Update
from zmqtrain.server.state import Pending, ShardState, WorkerRecord
from zmqtrain.store.layout import Variable
from zmqtrain.store.placement import place, with_copies
from zmqtrain.store.segment import Segment
from zmqtrain.store.shard import Shard, segment_layout
from zmqtrain.wire.messages import Push

SIZE = 8


def make_state(
    index: int = 0,
    rule: Rule | None = None,
    *,
    safe: bool = False,
    moving_average: float | None = None,
    copies: int = 1,
) -> ShardState:
    """Return shard ``index`` of two, of a job that has begun: all its parameters are 0."""
    layouts = place([Variable("w", (2 * SIZE,))], 2, partition_nbytes=4 * SIZE)
    layout = with_copies(layouts, copies)[index]
    update = Update(rule or SGD(1.0), fused=False, moving_average=moving_average)
    segment = Segment.private(segment_layout(layout, update))
    shard = Shard(layout, update, segment, safe=safe)
    state = ShardState(Task(Role.PS, index), shard)
    state.shard.initialize(np.zeros(layout.size, np.float32))
    state.generation = 1
    return state


def add_worker(state: ShardState, index: int = 0, **fields: Any) -> WorkerRecord:
    """Let a worker in, whose life is number 1."""
    worker = state.workers[index] = WorkerRecord(index, 1, ("nonce/1", "host:1", "", ""), **fields)
    return worker


def add_push(state: ShardState, sequence: int, request: Request | None = None) -> Pending:
    """Have a push of worker 0, whose gradient is all 1, lie ready."""
    state.shard.segment.gradient(0)[:] = 1
    state.shard.stage(0, 0, sequence)
    pending = Pending(Push(sequence, 0, 0, 1, 0.5), request)
    state.workers[0].pending = pending
    return pending


@pytest.fixture
def peers() -> PeerTable:
    return PeerTable(5.0, 2, lambda peer: False)
