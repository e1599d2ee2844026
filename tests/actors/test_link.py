"""A link's requests: how each of them ends, and what else comes over the link."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from tests.actors.conftest import FakePs, Worker
from tests.clock import Clock, StopClock
from tests.limits import within
from zmqtrain.actors import link as link_module
from zmqtrain.errors import CheckpointError, FencedError, PeerLostError, ProtocolError, RefusedError
from zmqtrain.wire.buffers import Tensor
from zmqtrain.wire.codec import Sender
from zmqtrain.wire.control import GetStatus
from zmqtrain.wire.messages import (
    Done,
    Heartbeat,
    HeartbeatReply,
    Leave,
    Pull,
    Push,
    PushReply,
    Refusal,
)

StartWorker = Callable[..., Any]

PUSH = Push(1, 0, 7, 32, 0.5)
RELEASE = PushReply(1, "applied", 1)
GRADIENT = np.arange(4, dtype=np.float32)


async def test_reply_is_what_the_request_returns(worker: Worker, ps: FakePs) -> None:
    asked = worker.ask(PUSH, tensors=(Tensor.of(GRADIENT),), sequence=1)
    (request,) = await ps.first(Push)
    assert (request.message, request.generation) == (PUSH, 5)
    assert request.sender == Sender("worker", 3, 2)
    assert request.tensors[0].array().tolist() == GRADIENT.tolist()
    ps.reply(request, RELEASE, (Tensor.of(GRADIENT * 2),))
    reply = await within(asked)
    assert (reply.message, reply.sender) == (RELEASE, Sender("ps", 0))
    assert reply.tensors[0].array().tolist() == [0, 2, 4, 6]


async def test_replies_find_their_requests_in_any_order(worker: Worker, ps: FakePs) -> None:
    asked = [worker.ask(GetStatus(seen=number)) for number in range(5)]
    for request in reversed(await ps.first(GetStatus, 5)):
        ps.reply(request, Done(str(request.message.seen)))
    assert [(await within(task)).message.text for task in asked] == list("01234")


async def test_reply_that_cannot_be_taken_in_fails_its_request(worker: Worker, ps: FakePs) -> None:
    """It would not be better if it came again."""

    def add(at: int, tensors: Any, out: Any) -> None:
        raise ValueError("operands could not be broadcast together")

    asked = worker.ask(PUSH, sequence=1, out=np.zeros(4, np.float32), add=add)
    (request,) = await ps.first(Push)
    reply = replace(RELEASE, is_difference=True)
    ps.reply(request, reply, (Tensor.of(GRADIENT),))
    with pytest.raises(ValueError, match="broadcast"):
        await within(asked)


async def test_refusal_raises_the_peers_error(worker: Worker, ps: FakePs) -> None:
    asked = worker.ask(Pull(), sequence=0)
    (request,) = await ps.first(Pull)
    ps.reply(request, Refusal("CheckpointError", "not now"))
    with pytest.raises(CheckpointError, match=r"^ps 0: not now$"):
        await within(asked)


@pytest.mark.parametrize("is_listening", [True, False])
async def test_deadline_names_the_peer_its_address_and_the_reason(
    worker: Worker, start_ps: Callable[[], FakePs], is_listening: bool
) -> None:
    if is_listening:
        start_ps()
    text = r"^ps 0 at \S+2222 did not answer worker 3 within 0\.03 s \(it has not let us go\): is "
    with pytest.raises(PeerLostError, match=text):
        await within(worker.ask(Leave(""), reason="it has not let us go", timeout_s=0.03))
    assert worker.count("rpc_timeouts") == 1


@pytest.fixture
def clock(stop_clock: StopClock) -> Clock:
    return stop_clock(link_module)


async def test_silent_peer_is_given_up(clock: Clock, start_worker: StartWorker, ps: FakePs) -> None:
    worker = await start_worker(peer_timeout_s=2.5)
    worker.on_beat = clock.tick
    await ps.first(Heartbeat, 2)
    ps.alive = None
    asked = [worker.ask(PUSH, sequence=1), worker.ask(Leave(""), timeout_s=100)]
    for ends in (*asked, worker.ps.silence()):
        with pytest.raises(PeerLostError, match=r"^ps 0 at \S+2222 has been silent for 3\.0 s: it"):
            await within(ends)
    with pytest.raises(PeerLostError, match=r"silent"):
        await within(worker.ask(Pull(), sequence=0))
    assert not worker.ps.is_alive
    assert worker.waits.snapshot() == ()


async def test_peer_that_shows_life_has_no_deadline(
    clock: Clock, start_worker: StartWorker, ps: FakePs
) -> None:
    worker = await start_worker(peer_timeout_s=2.5)
    worker.on_beat = clock.tick
    ps.alive = HeartbeatReply(received=1, answered=0)
    asked = worker.ask(PUSH, sequence=1)
    await ps.first(Heartbeat, 10)
    ps.reply(ps.of(Push)[0], RELEASE)
    assert (await within(asked)).message == RELEASE


async def test_link_is_alive_while_its_peer_was_heard_of_lately(
    clock: Clock, worker: Worker, ps: FakePs
) -> None:
    asked = worker.ask(Leave(""))
    ps.reply((await ps.first(Leave))[0], Done())
    await within(asked)
    assert worker.ps.is_alive
    clock.tick()
    assert not worker.ps.is_alive


async def test_heartbeats_begin_when_the_peer_has_welcomed_us(
    start_worker: StartWorker, ps: FakePs
) -> None:
    worker = await start_worker(joined=False)
    with pytest.raises(PeerLostError):
        await within(worker.ask(Leave(""), timeout_s=0.05))
    assert ps.of(Heartbeat) == []
    assert not worker.ps.is_alive
    worker.ps.joined = True
    (beat,) = await ps.first(Heartbeat)
    assert beat.message.saved_step == 7


async def test_refused_heartbeat_fences_every_request(worker: Worker, ps: FakePs) -> None:
    ps.alive = None
    asked = [worker.ask(PUSH, sequence=1), worker.ask(Leave(""))]
    await ps.first(Push)
    ps.alive = Refusal("FencedError", "worker 3 (incarnation 2) has not joined")
    for task in asked:
        with pytest.raises(FencedError, match=r"^ps 0: worker 3 \(incarnation 2\) has not joined$"):
            await within(task)
    assert worker.ps.fenced


async def test_refused_heartbeat_of_an_earlier_life_is_ignored(worker: Worker, ps: FakePs) -> None:
    ps.alive = None
    (beat,) = await ps.next(Heartbeat)
    worker.ps.joined = False
    asked = worker.ask(Leave(""))
    await ps.first(Leave)
    ps.reply(beat, Refusal("FencedError", "worker 3 has not joined"))
    ps.reply(ps.of(Leave)[0], Done())
    assert (await within(asked)).message == Done()
    assert not worker.ps.fenced


async def test_heartbeat_of_the_life_before_that_is_refused_late_does_not_fence_the_new_one(
    worker: Worker, ps: FakePs
) -> None:
    ps.alive = None
    (beat,) = await ps.next(Heartbeat)
    worker.ps.begin_life()
    worker.ps.joined = True
    ps.reply(beat, Refusal("FencedError", "worker 3 has not joined"))
    await ps.next(Heartbeat, 2)
    assert not worker.ps.fenced


async def test_bytes_that_are_no_message_are_counted_and_forgotten(
    worker: Worker, ps: FakePs
) -> None:
    asked = worker.ask(Leave(""))
    (request,) = await ps.first(Leave)
    ps.send_frames([b"\xc1"])
    ps.send_frames([b"\x81\xa1a\x01"])
    ps.reply(request, Done())
    assert (await within(asked)).message == Done()
    assert worker.count("decode_errors") == 2


async def test_peer_that_speaks_something_else_ends_the_wait_for_its_welcome(
    start_worker: StartWorker, ps: FakePs
) -> None:
    worker = await start_worker(joined=False)
    asked = worker.ask(Leave(""), timeout_s=10)
    await ps.first(Leave)
    ps.send_frames([b"\x92\x63\x01"])
    with pytest.raises(ProtocolError, match=r"^ps 0 at \S+2222: .* version 99, this task version"):
        await within(asked)


async def test_closed_link_ends_its_requests(worker: Worker, ps: FakePs) -> None:
    asked = worker.ask(PUSH, sequence=1)
    await ps.first(Push)
    worker.ps.close()
    with pytest.raises(PeerLostError, match=r"^the link to ps 0 was closed$"):
        await within(asked)
    with pytest.raises(PeerLostError, match="closed"):
        await within(worker.ask(PUSH, sequence=1))


@pytest.mark.parametrize("ps_answers", [True, False])
async def test_link_lingers_unless_its_peer_never_answered(
    ps_answers: bool, start_worker: Callable[..., Any], ps: FakePs
) -> None:
    worker = await start_worker(joined=False)
    asked = worker.ask(Leave(""))
    (request,) = await ps.first(Leave)
    if ps_answers:
        ps.reply(request, Done())
        await within(asked)
    worker.ps.endpoint.close = Mock(wraps=worker.ps.endpoint.close)
    worker.ps.close()
    worker.ps.endpoint.close.assert_called_once_with(discard=not ps_answers)
    await asyncio.wait([asked])
    assert ps_answers or isinstance(asked.exception(), PeerLostError)


async def test_wait_is_shown_while_it_lasts(worker: Worker, ps: FakePs) -> None:
    asked = worker.ask(PUSH, sequence=1, reason="it has not answered push 1")
    other = worker.ask(Leave(""), reason="goodbye", timeout_s=10)
    await ps.first(Leave)
    push, leave = worker.waits.snapshot()
    assert (push.owner, push.peer) == ("worker 3", "ps 0")
    assert push.reason == "it has not answered push 1"
    assert push.until_s is None
    assert leave.reason == "goodbye" and 0 < leave.until_s <= 10
    ps.reply(ps.of(Push)[0], RELEASE)
    await within(asked)
    assert [wait.reason for wait in worker.waits.snapshot()] == ["goodbye"]
    ps.reply(ps.of(Leave)[0], Refusal("RefusedError", "stay"))
    with pytest.raises(RefusedError):
        await within(other)
    assert worker.waits.snapshot() == ()


async def test_cancelled_request_leaves_no_wait(worker: Worker, ps: FakePs) -> None:
    asked = worker.ask(Leave(""), timeout_s=10)
    (request,) = await ps.first(Leave)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await within(asked)
    assert worker.waits.snapshot() == ()
    ps.reply(request, Done())
    await ps.next(Heartbeat, 2)
    assert ps.of(Refusal) == []


async def test_traffic_and_durations_are_measured(worker: Worker, ps: FakePs) -> None:
    asked = worker.ask(PUSH, sequence=1, tensors=(Tensor.of(np.zeros(5000, np.float32)),))
    ps.reply((await ps.first(Push))[0], RELEASE, (Tensor.of(np.zeros(7000, np.float32)),))
    await within(asked)
    assert worker.count("bytes_sent") > 20_000
    assert worker.count("bytes_received") > 28_000
    value = worker.metrics.registry.get_sample_value
    assert value("zmqtrain_rpc_duration_seconds_count", {"op": "Push"}) == 1
