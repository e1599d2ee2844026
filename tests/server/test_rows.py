"""Rows of a version that a ps keeps, which are read beside its event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from tests.asking import Asked
from tests.coordination.parts import make_host
from tests.limits import within
from tests.server.conftest import add_worker
from tests.store.with_tables import Job, push, rows, table
from zmqtrain.config.cluster import Role, Task
from zmqtrain.coordination.peers import PeerTable
from zmqtrain.errors import RefusedError
from zmqtrain.models.tables import WHOLE
from zmqtrain.optim import SGD, Update
from zmqtrain.protocol.orders import Apply
from zmqtrain.server.executor import Executor
from zmqtrain.server.rows import RowAccess
from zmqtrain.server.state import ShardState
from zmqtrain.wire.control import Keep
from zmqtrain.wire.messages import Join, Lookup
from zmqtrain.wire.rows import encoded

VARIABLE = table("t", dim=2, forget_after=1)
IDS = np.arange(4)


class Shard:
    """A ps of one table, of which the chief has had version 1 kept; rows are forgotten then."""

    def __init__(self) -> None:
        self.shard = Job([VARIABLE], [Update(SGD(0.1))]).begin()
        state = ShardState(Task(Role.PS, 0), self.shard)
        self.executor = Executor(make_host(), state, lambda outcome: None)
        self.executor.work.last_s = 0.0  # updates are known to be short
        self.peers = PeerTable(5.0, 2, lambda peer: False)
        self.access = RowAccess([VARIABLE], WHOLE, state, self.peers, self.executor)
        state.generation = 1
        add_worker(state)
        self.executor.keep(Keep(1))

    async def train(self, *ids: int) -> None:
        push(self.shard, 0, [rows(VARIABLE, 1, ids)])
        self.executor.carry_out([(0, Apply(0))])
        await self.orders_are_done()

    async def orders_are_done(self) -> None:
        done = asyncio.Event()
        self.executor.after_orders(done.set)
        await within(done.wait())

    def look_up(self, version: int) -> Asked:
        """Ask for rows as the chief does, which has joined."""
        chief = self.peers.join(Asked(sender="chief 0"), Join("chief/1", {}, "host:1", "", "", 0))
        assert chief is not None
        message = Lookup((0,), (len(IDS),), at=version)
        request = Asked(message, "chief 0", chief.incarnation)
        request.envelope = replace(request.envelope, tensors=(encoded([IDS]),))
        self.access.on_lookup(request, message)
        return request


@pytest.fixture
def ps() -> Iterator[Shard]:
    made = Shard()
    yield made
    made.executor.close()


async def test_rows_of_a_kept_version_are_read_beside_the_event_loop(ps: Shard) -> None:
    await ps.train(0, 1, 2)
    assert ps.shard.tables is not None
    expected = ps.shard.tables.rows(0, IDS)
    for _ in range(3):
        await ps.train(3)
    request = ps.look_up(1)
    assert not request.replies
    await ps.orders_are_done()
    (reply, (found,)) = request.replies[0]
    assert reply.version == 1
    np.testing.assert_array_equal(found.array(), expected.ravel())
    assert ps.shard.tables.rows(0, IDS).tobytes() != expected.tobytes()


@pytest.mark.parametrize("version", [1, 2])
async def test_rows_that_are_gone_are_refused_and_the_ps_goes_on(version: int, ps: Shard) -> None:
    """Be it that their version was not kept, or that the shard has begun anew."""
    await ps.train(0, 1, 2)
    ps.shard.initialize(np.zeros(ps.shard.layout.size, np.float32))
    request = ps.look_up(version)
    await ps.orders_are_done()
    assert isinstance(request.refusal, RefusedError)
    assert not request.replies
