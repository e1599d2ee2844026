"""A link sends lost messages again, and no others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.actors.conftest import FakePs, Worker
from tests.limits import within
from zmqtrain.wire.buffers import Tensor
from zmqtrain.wire.codec import Envelope
from zmqtrain.wire.messages import Done, Heartbeat, HeartbeatReply, Leave, Push, PushReply

PUSH = Push(1, 0, 7, 32, 0.5)
RELEASE = PushReply(1, "applied", 1)
GRADIENT = np.arange(4, dtype=np.float32)


def dropped(kind: type, times: int) -> Callable[[Envelope], bool]:
    """Ignore the first messages of this kind, as a connection that breaks does."""
    left = times

    def ignores(envelope: Envelope) -> bool:
        nonlocal left
        if type(envelope.message) is not kind or not left:
            return False
        left -= 1
        return True

    return ignores


async def test_push_that_never_arrived_is_sent_again(worker: Worker, ps: FakePs) -> None:
    ps.ignores = dropped(Push, 2)
    asked = worker.ask(PUSH, sequence=1, tensors=(Tensor.of(GRADIENT),))
    (request,) = await ps.first(Push)
    ps.alive = HeartbeatReply(received=1)
    assert request.tensors[0].array().tolist() == GRADIENT.tolist()
    ps.reply(request, RELEASE)
    assert (await within(asked)).message == RELEASE
    assert worker.count("rpc_retries") >= 2


async def test_push_whose_reply_was_lost_is_sent_again(worker: Worker, ps: FakePs) -> None:
    ps.alive = HeartbeatReply(received=1, answered=1)
    asked = worker.ask(PUSH, sequence=1)
    first, again = await ps.first(Push, 2)
    assert again.request_id == first.request_id
    ps.reply(again, RELEASE)
    assert (await within(asked)).message == RELEASE


@pytest.mark.usefixtures("resends_at_once")
async def test_push_that_the_peer_holds_is_not_sent_again(worker: Worker, ps: FakePs) -> None:
    ps.alive = HeartbeatReply(received=1, answered=0)
    asked = worker.ask(PUSH, sequence=1)
    await ps.first(Heartbeat, 10)
    assert len(ps.of(Push)) == 1
    ps.reply(ps.of(Push)[0], RELEASE)
    assert (await within(asked)).message == RELEASE
    assert worker.count("rpc_retries") == 0


async def test_answer_to_a_heartbeat_sent_before_the_push_proves_nothing(
    worker: Worker, ps: FakePs
) -> None:
    ps.alive = None
    (before,) = await ps.next(Heartbeat)
    asked = worker.ask(PUSH, sequence=1)
    await ps.first(Push)
    await ps.next(Heartbeat)
    ps.reply(before, HeartbeatReply(received=0, answered=0))
    await ps.next(Heartbeat, 2)
    assert len(ps.of(Push)) == 1
    ps.reply(ps.of(Push)[0], RELEASE)
    assert (await within(asked)).message == RELEASE


@pytest.mark.usefixtures("resends_at_once")
async def test_other_requests_are_sent_again_from_time_to_time(worker: Worker, ps: FakePs) -> None:
    asked = worker.ask(Leave("done"))
    requests = await ps.first(Leave, 4)
    assert len({request.request_id for request in requests}) == 1
    ps.reply(requests[0], Done())
    assert (await within(asked)).message == Done()
    await ps.next(Heartbeat, 2)
    sent = len(ps.of(Leave))
    await ps.next(Heartbeat, 3)
    assert len(ps.of(Leave)) == sent
    assert worker.count("rpc_retries") == sent - 1


@pytest.mark.parametrize(
    ("peer_timeout_s", "timeout_s", "resend_s"),
    [(60, None, 5), (6, None, 1.5), (60, 8, 2), (6, 60, 1.5)],
)
async def test_lost_request_is_sent_again_before_it_is_given_up_with_its_peer(
    ps: FakePs,
    start_worker: Callable[..., Any],
    peer_timeout_s: float,
    timeout_s: float | None,
    resend_s: float,
) -> None:
    worker = await start_worker(peer_timeout_s)
    asked = worker.ps.begin(Leave(""), reason="it has not answered", timeout_s=timeout_s)
    assert asked.resend_s == resend_s
    worker.ps.end(asked)


@pytest.mark.usefixtures("resends_at_once")
async def test_request_that_found_the_queue_full_is_sent_later(
    worker: Worker, start_ps: Callable[[], FakePs]
) -> None:
    worker.ps.joined = False
    for _ in range(100):
        worker.ps.send(Done())
    asked = worker.ask(Leave(""))
    await asyncio.sleep(0)
    ps = start_ps()
    ps.reply((await ps.first(Leave))[0], Done())
    assert (await within(asked)).message == Done()
