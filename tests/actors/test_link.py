"""A link's requests: how each ends, and what is sent again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from zmqtrain import errors
from zmqtrain.actors import link as link_module
from zmqtrain.errors import FencedError, PeerLostError, RefusedError, ZmqTrainError
from zmqtrain.wire.buffers import Tensor
from zmqtrain.wire.codec import Envelope, Sender
from zmqtrain.wire.messages import (
    Alive,
    Done,
    GetStatus,
    Heartbeat,
    Leave,
    Pull,
    Push,
    Refusal,
    Release,
    Shutdown,
)

Worker = Any  # of conftest.py, as FakePs and Within
FakePs = Any
Within = Callable[[Any], Any]
StartWorker = Callable[..., Any]

PUSH = Push(1, 0, 7, 32, 0.5)
RELEASE = Release(1, "applied", 1)
GRADIENT = np.arange(4, dtype=np.float32)


async def test_reply_is_what_the_request_returns(
    worker: Worker, ps: FakePs, within: Within
) -> None:
    asked = worker.ask(PUSH, tensors=(Tensor.of(GRADIENT),), sequence=1)
    (request,) = await ps.first(Push)
    assert (request.message, request.sender, request.epoch) == (PUSH, Sender("worker", 3, 2), 5)
    assert request.tensors[0].array().tolist() == GRADIENT.tolist()
    ps.reply(request, RELEASE, (Tensor.of(GRADIENT * 2),))
    reply = await within(asked)
    assert (reply.message, reply.sender) == (RELEASE, Sender("ps", 0))
    assert reply.tensors[0].array().tolist() == [0, 2, 4, 6]


async def test_replies_find_their_requests_in_any_order(
    worker: Worker, ps: FakePs, within: Within
) -> None:
    asked = [worker.ask(GetStatus(seen=number)) for number in range(5)]
    for request in reversed(await ps.first(GetStatus, 5)):
        ps.reply(request, Done(str(request.message.seen)))
    assert [(await within(task)).message.text for task in asked] == list("01234")


@pytest.mark.parametrize(
    "kind",
    [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, ZmqTrainError)
    ],
)
async def test_refusal_raises_the_peers_error(
    worker: Worker, ps: FakePs, within: Within, kind: type[ZmqTrainError]
) -> None:
    asked = worker.ask(Pull(), sequence=0)
    (request,) = await ps.first(Pull)
    ps.reply(request, Refusal(kind.__name__, "not now"))
    with pytest.raises(kind) as caught:
        await within(asked)
    assert type(caught.value) is kind
    assert str(caught.value) == "ps 0: not now"


@pytest.mark.parametrize("is_listening", [True, False])
async def test_deadline_names_the_peer_its_address_and_the_reason(
    worker: Worker, start_ps: Callable[[], FakePs], within: Within, is_listening: bool
) -> None:
    if is_listening:
        start_ps()
    with pytest.raises(PeerLostError) as caught:
        await within(worker.ask(Leave(""), reason="it has not let us go", timeout_s=0.03))
    assert str(caught.value) == (
        "ps 0 at tcp://ps-0:2222 did not answer within 0.03 s (it has not let us go): is it "
        "running, and is this its address?"
    )
    assert worker.count("rpc_timeouts") == 1


async def test_reply_in_time_is_not_followed_by_the_deadline(
    worker: Worker, ps: FakePs, within: Within
) -> None:
    asked = worker.ask(Leave(""), timeout_s=10)
    ps.reply((await ps.first(Leave))[0], Done())
    assert (await within(asked)).message == Done()
    assert worker.count("rpc_timeouts") == 0


async def test_silent_peer_is_given_up(
    start_worker: StartWorker, ps: FakePs, within: Within
) -> None:
    worker = await start_worker(peer_timeout_s=0.05)
    await ps.first(Heartbeat, 2)
    assert worker.ps.is_alive
    ps.alive = None
    asked = [worker.ask(PUSH, sequence=1), worker.ask(Leave(""), timeout_s=10)]
    for task in asked:
        with pytest.raises(PeerLostError, match=r"^ps 0 has been silent for \d\.\d s$"):
            await within(task)
    with pytest.raises(PeerLostError, match=r"^ps 0 has been silent for \d\.\d s$"):
        await within(worker.ps.silence())
    with pytest.raises(PeerLostError, match="silent"):
        await within(worker.ask(Pull(), sequence=0))
    assert not worker.ps.is_alive
    assert worker.waits.snapshot() == ()


async def test_peer_that_shows_life_may_take_as_long_as_it_likes(
    start_worker: StartWorker, ps: FakePs, within: Within
) -> None:
    worker = await start_worker(peer_timeout_s=0.2)
    ps.alive = Alive(received=1, answered=0)
    asked = worker.ask(PUSH, sequence=1)
    await ps.first(Heartbeat, 30)
    ps.reply(ps.of(Push)[0], RELEASE)
    assert (await within(asked)).message == RELEASE


async def test_heartbeats_begin_when_the_peer_has_welcomed_us(
    start_worker: StartWorker, ps: FakePs, within: Within
) -> None:
    worker = await start_worker(joined=False)
    with pytest.raises(PeerLostError):
        await within(worker.ask(Leave(""), timeout_s=0.05))
    assert ps.of(Heartbeat) == []
    assert not worker.ps.is_alive
    worker.ps.joined = True
    (beat,) = await ps.first(Heartbeat)
    assert beat.message.facts == {"step": 7.0}


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


@pytest.mark.parametrize(
    ("message", "sequence"), [(PUSH, 1), (Pull(), 0)], ids=lambda value: type(value).__name__
)
async def test_push_that_never_arrived_is_sent_again(
    worker: Worker, ps: FakePs, within: Within, message: Any, sequence: int
) -> None:
    ps.alive = Alive(received=sequence - 1, answered=sequence - 1)
    ps.ignores = dropped(type(message), 2)
    asked = worker.ask(message, sequence=sequence, tensors=(Tensor.of(GRADIENT),))
    (request,) = await ps.first(type(message))
    ps.alive = Alive(received=sequence, answered=sequence - 1)
    assert request.tensors[0].array().tolist() == GRADIENT.tolist()
    ps.reply(request, RELEASE)
    assert (await within(asked)).message == RELEASE
    assert worker.count("rpc_retries") == 2


async def test_push_whose_reply_was_lost_is_sent_again(
    worker: Worker, ps: FakePs, within: Within
) -> None:
    ps.alive = Alive(received=1, answered=1)
    asked = worker.ask(PUSH, sequence=1)
    first, again = await ps.first(Push, 2)
    assert again.request_id == first.request_id
    ps.reply(again, RELEASE)
    assert (await within(asked)).message == RELEASE


async def test_push_that_the_peer_holds_is_not_sent_again(
    worker: Worker, ps: FakePs, within: Within, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "RESEND_S", 0.0)
    ps.alive = Alive(received=1, answered=0)
    asked = worker.ask(PUSH, sequence=1)
    await ps.first(Heartbeat, 10)
    assert len(ps.of(Push)) == 1
    ps.reply(ps.of(Push)[0], RELEASE)
    assert (await within(asked)).message == RELEASE
    assert worker.count("rpc_retries") == 0


async def test_answer_to_a_heartbeat_sent_before_the_push_proves_nothing(
    worker: Worker, ps: FakePs, within: Within
) -> None:
    ps.alive = None
    (before,) = await ps.next(Heartbeat)
    asked = worker.ask(PUSH, sequence=1)
    await ps.first(Push)
    await ps.next(Heartbeat)
    ps.reply(before, Alive(received=0, answered=0))
    await ps.next(Heartbeat, 2)
    assert len(ps.of(Push)) == 1
    ps.reply(ps.of(Push)[0], RELEASE)
    assert (await within(asked)).message == RELEASE


async def test_other_requests_are_sent_again_from_time_to_time(
    worker: Worker, ps: FakePs, within: Within, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "RESEND_S", 0.0)
    asked = worker.ask(Leave("done"))
    requests = await ps.first(Leave, 4)
    assert len({request.request_id for request in requests}) == 1
    ps.reply(requests[0], Done())
    assert (await within(asked)).message == Done()
    sent = len(ps.of(Leave))
    await ps.next(Heartbeat, 3)
    assert len(ps.of(Leave)) == sent
    assert worker.count("rpc_retries") == sent - 1


async def test_request_that_found_the_queue_full_is_sent_later(
    worker: Worker,
    start_ps: Callable[[], FakePs],
    within: Within,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker.ps.joined = False
    for _ in range(100):
        worker.ps.tell(Done())
    asked = worker.ask(Leave(""))
    await asyncio.sleep(0)
    monkeypatch.setattr(link_module, "RESEND_S", 0.0)
    ps = start_ps()
    ps.reply((await ps.first(Leave))[0], Done())
    assert (await within(asked)).message == Done()


async def test_second_reply_is_dropped(worker: Worker, ps: FakePs, within: Within) -> None:
    asked = worker.ask(PUSH, sequence=1)
    (request,) = await ps.first(Push)
    ps.reply(request, RELEASE)
    ps.reply(request, RELEASE)
    await within(asked)
    ps.reply(request, RELEASE)
    await ps.next(Heartbeat, 2)
    assert ps.of(Refusal) == []


async def test_late_refusal_harms_no_other_request(
    worker: Worker, ps: FakePs, within: Within
) -> None:
    first = worker.ask(Leave(""), timeout_s=0.02)
    with pytest.raises(PeerLostError):
        await within(first)
    asked = worker.ask(PUSH, sequence=1)
    await ps.first(Push)
    ps.reply(ps.of(Leave)[0], Refusal("RefusedError", "too late"))
    ps.reply(ps.of(Push)[0], RELEASE)
    assert (await within(asked)).message == RELEASE
    assert not worker.ps.fenced


async def test_refused_heartbeat_fences_whatever_is_asked(
    worker: Worker, ps: FakePs, within: Within
) -> None:
    ps.alive = None
    asked = [worker.ask(PUSH, sequence=1), worker.ask(Leave(""))]
    await ps.first(Push)
    ps.alive = Refusal("FencedError", "worker 3 (incarnation 2) has not joined")
    for task in asked:
        with pytest.raises(FencedError) as caught:
            await within(task)
        assert str(caught.value) == "ps 0: worker 3 (incarnation 2) has not joined"
    assert worker.ps.fenced


async def test_refused_heartbeat_of_the_life_before_is_nothing_new(
    worker: Worker, ps: FakePs, within: Within
) -> None:
    ps.alive = None
    (beat,) = await ps.next(Heartbeat)
    worker.ps.joined = False
    asked = worker.ask(Leave(""))
    await ps.first(Leave)
    ps.reply(beat, Refusal("FencedError", "worker 3 has not joined"))
    ps.reply(ps.of(Leave)[0], Done())
    assert (await within(asked)).message == Done()
    assert not worker.ps.fenced


async def test_message_that_nobody_asked_for_is_handed_on(
    worker: Worker, ps: FakePs, within: Within
) -> None:
    await ps.first(Heartbeat)
    ps.send(Shutdown(0, "the run is over"))
    assert await within(worker.told.get()) == Shutdown(0, "the run is over")


async def test_what_is_told_arrives_without_a_wait(worker: Worker, ps: FakePs) -> None:
    worker.ps.tell(Leave("done"))
    assert worker.waits.snapshot() == ()
    (told,) = await ps.first(Leave)
    assert (told.request_id, told.message) == (0, Leave("done"))


async def test_bytes_that_are_no_message_are_counted_and_forgotten(
    worker: Worker, ps: FakePs, within: Within
) -> None:
    asked = worker.ask(Leave(""))
    (request,) = await ps.first(Leave)
    ps.send_frames([b"\xc1"])
    ps.send_frames([b"\x81\xa1a\x01"])
    ps.reply(request, Done())
    assert (await within(asked)).message == Done()
    assert worker.count("decode_errors") == 2


async def test_closed_link_ends_its_requests(worker: Worker, ps: FakePs, within: Within) -> None:
    asked = worker.ask(PUSH, sequence=1)
    await ps.first(Push)
    worker.ps.close()
    with pytest.raises(PeerLostError) as caught:
        await within(asked)
    assert str(caught.value) == "the link to ps 0 was closed"
    with pytest.raises(PeerLostError, match="closed"):
        await within(worker.ask(PUSH, sequence=1))


async def test_wait_is_shown_while_it_lasts(worker: Worker, ps: FakePs, within: Within) -> None:
    asked = worker.ask(PUSH, sequence=1, reason="it has not answered push 1")
    other = worker.ask(Leave(""), reason="goodbye", timeout_s=10)
    await ps.first(Leave)
    push, leave = worker.waits.snapshot()
    assert (push.owner, push.peer, push.reason) == (
        "worker 3",
        "ps 0",
        "it has not answered push 1",
    )
    assert push.until_s is None
    assert leave.reason == "goodbye" and 0 < leave.until_s <= 10
    ps.reply(ps.of(Push)[0], RELEASE)
    await within(asked)
    assert [wait.reason for wait in worker.waits.snapshot()] == ["goodbye"]
    ps.reply(ps.of(Leave)[0], Refusal("RefusedError", "stay"))
    with pytest.raises(RefusedError):
        await within(other)
    assert worker.waits.snapshot() == ()


async def test_cancelled_request_waits_for_nobody(
    worker: Worker, ps: FakePs, within: Within
) -> None:
    asked = worker.ask(Leave(""), timeout_s=10)
    (request,) = await ps.first(Leave)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await within(asked)
    assert worker.waits.snapshot() == ()
    ps.reply(request, Done())
    await ps.next(Heartbeat, 2)
    assert ps.of(Refusal) == []


async def test_traffic_and_durations_are_measured(
    worker: Worker, ps: FakePs, within: Within
) -> None:
    asked = worker.ask(PUSH, sequence=1, tensors=(Tensor.of(np.zeros(5000, np.float32)),))
    ps.reply((await ps.first(Push))[0], RELEASE, (Tensor.of(np.zeros(7000, np.float32)),))
    await within(asked)
    assert worker.count("bytes_sent") > 20_000
    assert worker.count("bytes_received") > 28_000
    value = worker.metrics.registry.get_sample_value
    assert value("zmqtrain_rpc_duration_seconds_count", {"op": "Push"}) == 1
