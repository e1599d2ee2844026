"""Parts of the parameters that lie on several ps: what travels, and that all copies are equal."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

import zmqtrain.exchanges.reads as reads
from tests.exchanges.conftest import KINDS, guest_of
from tests.exchanges.test_state import make_job, train
from tests.plans import planned
from zmqtrain.actors.link import Link
from zmqtrain.compute.arrays import Flat, zeros
from zmqtrain.errors import ExitCode
from zmqtrain.exchanges.parameter_server import ParameterServerExchange
from zmqtrain.store.layout import ShardLayout
from zmqtrain.training.exchange import Membership
from zmqtrain.transport.memory import MemoryTransport
from zmqtrain.wire.messages import Read

FIELDS: dict[str, Any] = {"exchange": "direct", "policy": "sync-replicas"}


@dataclass
class Outcome:
    """Result of a job with one worker on 3 ps, some of them near to it and to the chief.

    Numbers of elements are by ps.
    """

    steps: list[dict[str, bytes]] = field(default_factory=list)  # the variables before each
    shards: list[tuple[ShardLayout, Flat]] = field(default_factory=list)
    came: list[int] = field(default_factory=list)  # elements that a step brings to the worker
    read: dict[str, int] = field(default_factory=dict)  # elements that the chief was sent at once
    whole: list[Flat] = field(default_factory=list)  # what each ps sends who asks for copies
    written: int = 0  # arrays that a gradient is written to

    @property
    def owned(self) -> list[int]:
        return [layout.owned.stop - layout.owned.start for layout, _ in self.shards]


async def run(copies: int, near: set[int], **fields: Any) -> Outcome:
    plan = planned(make_job(copies=copies, **FIELDS | fields), ps=0, workers=3)
    plan, job = replace(plan, workers=1), plan.job
    transport, outcome = MemoryTransport(), Outcome()

    request, join = Link.request, ParameterServerExchange.join

    async def note_read(link: Link, message: Any, **options: Any) -> Any:
        if isinstance(message, Read) and message.values and not message.copies:
            outcome.read[link.peer] = len(options["out"])
        return await request(link, message, **options)

    async def note_written(exchange: ParameterServerExchange) -> Membership:
        membership = await join(exchange)
        outcome.written = len(membership.gradients)
        return membership

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Link, "request", note_read)
        patch.setattr(ParameterServerExchange, "join", note_written)
        guest, chief, servers = guest_of(plan, transport, far={0, 1, 2} - near)
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            for actor in (*servers, guest, chief):
                group.create_task(actor.run())
            exchange = await guest.exchange
            assert isinstance(exchange, ParameterServerExchange)
            found = await train(job, exchange)
            outcome.came = [0 if lane.out is None else len(lane.out) for lane in exchange.lanes]
            for link, server in zip(guest.links, servers, strict=True):
                shard = server.state.shard
                outcome.shards.append((shard.layout, shard.parameters.copy()))
                outcome.whole.append(zeros(shard.layout.size))
                await reads.read_parameters(
                    link, None, shard.layout, outcome.whole[-1], copies=True
                )
            guest.stop(0)
            chief.stop(int(ExitCode.INTERRUPTED))
    transport.close()
    outcome.steps = [{name: value.tobytes() for name, value in values.items()} for values in found]
    assert chief.summary is not None
    return outcome


@pytest.mark.parametrize("fields", [{}, {"overlap": True}], ids=["after", "overlap"])
@pytest.mark.parametrize(
    ("copies", "near", "come", "written"),
    [
        (1, set(), {0, 1, 2}, 3),
        (1, {0}, {1, 2}, 3),
        (2, set(), {0, 1, 2}, 3),
        (2, {0}, {1}, 3),  # ps 0 holds part 2, too
        (2, {1}, {2}, 3),
        (2, {0, 1}, set(), 3),
        (3, set(), {0, 1, 2}, 3),
        (3, {2}, set(), 1),  # what is sent to the others is what the model writes for ps 2
        (3, {0, 2}, set(), 2),
    ],
)
async def test_only_what_no_near_ps_holds_travels_and_all_copies_are_equal(
    copies: int, near: set[int], come: set[int], written: int, fields: dict[str, Any]
) -> None:
    job = make_job(policy="sync-replicas", **fields)
    async with KINDS["local"](job) as exchange:
        expected = await train(job, exchange)
    found = await run(copies, near, **fields)
    assert found.steps == [
        {name: value.tobytes() for name, value in values.items()} for values in expected
    ]
    assert found.came == [size if n in come else 0 for n, size in enumerate(found.owned)]
    assert found.written == written
    held: dict[Any, list[bytes]] = {}
    for layout, flat in found.shards:
        for cut in layout.slices:
            values = held.setdefault((cut.variable.name, cut.start), [])
            values.append(cut.run(flat).tobytes())
    assert {len(values) for values in held.values()} == {copies}
    assert all(len(set(values)) == 1 for values in held.values())


@pytest.mark.parametrize("copies", [1, 2, 3])
async def test_chief_is_sent_what_each_ps_owns_and_who_asks_for_it_all_of_it(copies: int) -> None:
    found = await run(copies, {1})
    assert found.read == {f"ps {n}": found.owned[n] for n in (0, 2)}
    for (_, flat), whole in zip(found.shards, found.whole, strict=True):
        assert whole.tobytes() == flat.tobytes()
