"""Admission by a ps, and the time for which a leaving ps waits for its workers."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

import pytest

from tests.asking import Asked
from tests.constants import Constants
from tests.coordination.parts import add_peer, make_host
from tests.server.conftest import make_state
from zmqtrain.config.timing import Timing
from zmqtrain.coordination.peers import PeerTable
from zmqtrain.errors import RefusedError
from zmqtrain.fingerprint import DATA
from zmqtrain.server import peer_handlers
from zmqtrain.server.peer_handlers import PeerHandlers
from zmqtrain.wire.control import Shutdown
from zmqtrain.wire.messages import Heartbeat, HeartbeatReply, Join, Leave

TIMING = Timing(heartbeat_s=100.0, lease_s=200.0)


@pytest.fixture
def members(peers: PeerTable, constants: Constants) -> PeerHandlers:
    constants(peer_handlers, FAREWELL_S=0.01)
    state = make_state()
    made = PeerHandlers(make_host(), state, peers)
    state.join(add_peer(peers, "worker 0"))
    made.close(Shutdown(0, "step 10 of 10 is done"))
    return made


async def test_ps_waits_for_goodbyes_of_workers_that_show_life(members: PeerHandlers) -> None:
    draining = asyncio.ensure_future(members.drain(TIMING))
    await asyncio.sleep(0.1)
    assert not draining.done()
    members.on_leave(Asked(incarnation=1), Leave("told to"))
    await asyncio.wait_for(draining, 5.0)


async def test_ps_does_not_wait_for_workers_that_are_silent(
    members: PeerHandlers, peers: PeerTable
) -> None:
    for peer in peers:
        peer.heard_at = time.monotonic() - 1000.0
    await asyncio.wait_for(members.drain(TIMING), 5.0)


async def test_worker_that_joins_or_beats_after_the_end_is_told_to_leave(
    members: PeerHandlers, peers: PeerTable
) -> None:
    request = Asked(incarnation=1)
    members.on_heartbeat(request, Heartbeat())
    assert request.replies == [HeartbeatReply(0, 0)]
    assert request.sent == [Shutdown(0, "step 10 of 10 is done")]


def join(index: int, data: str) -> Asked:
    return Asked(Join(f"{index}/{data}", {DATA: data}, "host:1", "", "", 0), f"worker {index}")


def test_join_that_is_refused_or_waits_does_not_decide_which_data_the_job_has(
    peers: PeerTable,
) -> None:
    handlers = PeerHandlers(make_host(), make_state(), peers)
    is_alive = add_peer(peers, "worker 0")
    for wrong in (join(-1, "refused"), join(is_alive.index, "waits")):
        with suppress(RefusedError):
            assert handlers.on_join(wrong, wrong.envelope.message) == (None, None)
    right, other = join(1, "right"), join(2, "other")
    _, begun = handlers.on_join(right, right.envelope.message)
    assert begun is not None
    with pytest.raises(RefusedError, match="worker 2 runs another job"):
        handlers.on_join(other, other.envelope.message)
