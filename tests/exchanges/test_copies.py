"""Parts of the parameters that lie on several ps: what travels, and that all copies are equal."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import zmqtrain.exchanges.lanes as lanes
from tests.exchanges.conftest import Guest
from tests.exchanges.test_state import make_job, train
from zmqtrain.chief.chief import Chief
from zmqtrain.config.cluster import Role
from zmqtrain.config.task import TaskConfig
from zmqtrain.errors import ExitCode
from zmqtrain.exchanges.parameter_server import ParameterServerExchange
from zmqtrain.server.server import ParameterServer
from zmqtrain.transport.memory import MemoryTransport

FIELDS: dict[str, Any] = {"exchange": "direct", "policy": "sync-replicas"}


async def run(copies: int, near: set[int], **fields: Any) -> tuple[Any, list[int], list[Any]]:
    """Train with one worker on 3 ps, of which some are near.

    Return the variables before every step, how many elements come from each ps, and the shards.
    """
    job = make_job(copies=copies, **FIELDS | fields).hosted(True)
    transport = MemoryTransport()
    addresses = tuple(f"ipc://memory/{shard}" for shard in range(3))

    def config(role: Role, index: int = 0) -> TaskConfig:
        return TaskConfig(role=role, job="job", index=index, ps=addresses, workers=1)

    map_segment = lanes.map_segment

    async def map_near(actor: Any, shard: int, joined: Any) -> Any:
        return await map_segment(actor, shard, joined) if shard in near else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lanes, "map_segment", map_near)
        guest = Guest(config(Role.WORKER), job, transport)
        chief = Chief(config(Role.CHIEF), job, transport, lambda status: None)
        servers = [ParameterServer(config(Role.PS, index), job, transport) for index in range(3)]
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            for actor in (*servers, guest, chief):
                group.create_task(actor.run())
            exchange = await guest.exchange
            assert isinstance(exchange, ParameterServerExchange)
            found = await train(job, exchange)
            came = [0 if lane.out is None else len(lane.out) for lane in exchange.lanes]
            shards = [
                (server.state.shard.layout, server.state.shard.parameters.copy())
                for server in servers
            ]
            guest.stop(0)
            chief.stop(int(ExitCode.INTERRUPTED))
    transport.close()
    steps = [{name: value.tobytes() for name, value in values.items()} for values in found]
    return steps, came, shards


def sizes(shards: list[Any]) -> list[int]:
    return [layout.owned.stop - layout.owned.start for layout, _ in shards]


@pytest.mark.parametrize("fields", [{}, {"overlap": True}], ids=["after", "overlap"])
@pytest.mark.parametrize(
    ("copies", "near", "come"),
    [
        (1, set(), {0, 1, 2}),
        (1, {0}, {1, 2}),
        (2, set(), {0, 1, 2}),
        (2, {0}, {1}),  # ps 0 holds part 2, too
        (2, {1}, {2}),
        (2, {0, 1}, set()),
        (3, {2}, set()),
    ],
)
async def test_only_what_no_near_ps_holds_travels_and_all_copies_are_equal(
    copies: int, near: set[int], come: set[int], fields: dict[str, Any]
) -> None:
    expected, _, _ = await run(1, {0, 1, 2}, **fields)
    steps, came, shards = await run(copies, near, **fields)
    assert steps == expected
    assert came == [size if n in come else 0 for n, size in enumerate(sizes(shards))]
    held: dict[Any, list[bytes]] = {}
    for layout, flat in shards:
        for cut in layout.slices:
            values = held.setdefault((cut.variable.name, cut.start), [])
            values.append(cut.run(flat).tobytes())
    assert {len(values) for values in held.values()} == {copies}
    assert all(len(set(values)) == 1 for values in held.values())
