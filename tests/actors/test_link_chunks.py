"""Large tensors go ahead of their message in chunks, as fast as the peer takes them in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np
import pytest

from tests.actors.conftest import FakePs, Worker
from tests.chunk_sizes import chunks_of
from tests.clock import StopClock
from tests.limits import within
from zmqtrain.actors import link as link_module
from zmqtrain.compute.arrays import Flat
from zmqtrain.errors import ProtocolError
from zmqtrain.wire.buffers import Tensor
from zmqtrain.wire.chunks import Chunks, as_it_is
from zmqtrain.wire.codec import Envelope
from zmqtrain.wire.messages import (
    Chunk,
    ChunksReceived,
    Heartbeat,
    HeartbeatReply,
    Message,
    Parameters,
    Pull,
    PullReply,
    Push,
    PushReply,
    Read,
)

PUSH = Push(1, 0, 7, 32, 0.5)
RELEASE = PushReply(1, "applied", 1)
NBYTES = 400  # of a chunk


@pytest.fixture(autouse=True)
def small_chunks() -> Iterator[None]:
    with chunks_of(NBYTES // 4):
        yield


def chunks(count: int, sequence: int = 1, *, in_order: bool = True) -> Chunks:
    """Return chunks of 100 elements, each of which holds its index."""
    flat = np.repeat(np.arange(count, dtype=np.float32), NBYTES // 4)
    return Chunks(flat, sequence, as_it_is, in_order=in_order)


def indices(envelopes: list[Envelope]) -> list[int]:
    """Return which chunks came, and -1 for the push; heartbeats are passed over."""
    return [
        envelope.message.index if isinstance(envelope.message, Chunk) else -1
        for envelope in envelopes
        if isinstance(envelope.message, Chunk | Push)
    ]


def nothing(chunks: int) -> Flat:
    """Return where parameters are to be laid, of so many chunks."""
    return np.full(chunks * NBYTES // 4, np.nan, np.float32)


def laid(out: Flat) -> list[int]:
    """Return which chunk lies in each place, -1: none."""
    starts = np.nan_to_num(out[:: NBYTES // 4], nan=-1)
    assert np.array_equal(np.nan_to_num(out, nan=-1), np.repeat(starts, NBYTES // 4))
    return [int(start) for start in starts]


def answer(
    ps: FakePs, request: Envelope, reply: Any, count: int, lost: Collection[int] = ()
) -> None:
    """Answer with parameters in so many chunks, some of which are lost."""
    for chunk, tensors in chunks(count, sequence=reply.version):
        if chunk.index not in lost:
            ps.reply(request, chunk, tensors)
    ps.reply(request, reply)


async def settled(ps: FakePs) -> list[int]:
    """Return what came up to now: all that the link sent, for a heartbeat has come behind it."""
    await ps.next(Heartbeat, 2)
    return indices(ps.received)


async def test_chunks_stop_at_the_window_go_on_when_taken_and_the_message_is_last(
    worker: Worker, ps: FakePs
) -> None:
    ps.alive = None
    worker.ps.window_nbytes = 3 * NBYTES
    asked = worker.ask(PUSH, sequence=1, chunks=chunks(7))
    assert await settled(ps) == [0, 1, 2]
    first = ps.of(Chunk)[0]
    ps.reply(first, ChunksReceived(2 * NBYTES))
    assert await settled(ps) == [0, 1, 2, 3, 4]
    ps.reply(first, ChunksReceived(NBYTES - 1))  # not enough for one more
    assert await settled(ps) == [0, 1, 2, 3, 4]
    ps.reply(first, ChunksReceived(NBYTES + 1))
    assert await settled(ps) == [0, 1, 2, 3, 4, 5, 6, -1]
    ps.reply(first, ChunksReceived(3 * NBYTES))
    assert await settled(ps) == [0, 1, 2, 3, 4, 5, 6, -1]
    (push,) = ps.of(Push)
    assert push.tensors == ()
    for index, chunk in enumerate(ps.of(Chunk)):
        assert (chunk.message, chunk.request_id) == (Chunk(1, index), push.request_id)
        assert (chunk.tensors[0].array() == index).all()
    ps.reply(push, RELEASE)
    assert (await within(asked)).message == RELEASE


@pytest.mark.parametrize("taken_at_once", [NBYTES // 4, NBYTES, 5 * NBYTES // 2])
@pytest.mark.parametrize("window_nbytes", [0, NBYTES, 5 * NBYTES // 2, 1 << 30])
async def test_no_more_than_the_window_is_under_way_and_no_less_than_one_chunk(
    worker: Worker, ps: FakePs, window_nbytes: int, taken_at_once: int
) -> None:
    ps.alive = None
    worker.ps.window_nbytes = window_nbytes
    asked = worker.ask(PUSH, sequence=1, chunks=chunks(6))
    taken = 0
    while -1 not in (came := await settled(ps)):
        under_way = NBYTES * len(came) - taken
        assert under_way <= max(NBYTES, window_nbytes)
        assert 0 < under_way and under_way + NBYTES > window_nbytes  # else there is more to send
        step = min(under_way, taken_at_once)
        ps.reply(ps.of(Chunk)[0], ChunksReceived(step))
        taken += step
    assert came == [0, 1, 2, 3, 4, 5, -1]
    ps.reply(ps.of(Push)[0], RELEASE)
    await within(asked)


@pytest.mark.parametrize("lost", [{0}, {2}, {1, 3}, {0, 1, 2, 3}, {-1}])
async def test_push_with_a_lost_part_is_sent_again_from_its_first_chunk(
    worker: Worker, ps: FakePs, lost: set[int]
) -> None:
    to_lose = set(lost)

    def loses(envelope: Envelope) -> bool:
        """Lose what is to be lost, once; a whole push has been received."""
        for number in indices([envelope]):
            if number in to_lose:
                to_lose.remove(number)
                return True
            if number == -1 and indices(ps.received)[-4:] == [0, 1, 2, 3]:
                ps.alive = HeartbeatReply(received=1, answered=0)
        return False

    ps.alive = HeartbeatReply(received=0, answered=0)
    ps.ignores = loses
    worker.ps.window_nbytes = 4 * NBYTES
    asked = worker.ask(PUSH, sequence=1, chunks=chunks(4))
    sent = [0, 1, 2, 3, -1]
    while ps.alive.received == 0:
        await ps.next(Heartbeat)
    arrived = [number for number in sent if number not in lost]
    assert await settled(ps) == [*arrived, *sent]
    ps.reply(ps.of(Push)[-1], RELEASE)
    assert (await within(asked)).message == RELEASE
    assert worker.count("rpc_retries") == 1


async def test_answer_to_a_heartbeat_sent_before_the_last_chunks_proves_nothing(
    worker: Worker, ps: FakePs
) -> None:
    ps.alive = None
    worker.ps.window_nbytes = NBYTES
    asked = worker.ask(PUSH, sequence=1, chunks=chunks(3))
    (first,) = await ps.first(Chunk)
    (before,) = await ps.next(Heartbeat)
    ps.reply(first, ChunksReceived(NBYTES))
    await ps.first(Chunk, 2)
    ps.reply(before, HeartbeatReply(received=0, answered=0))
    assert await settled(ps) == [0, 1]
    ps.reply(first, ChunksReceived(NBYTES))
    assert await settled(ps) == [0, 1, 2, -1]
    ps.reply(ps.of(Push)[0], RELEASE)
    assert (await within(asked)).message == RELEASE
    assert worker.count("rpc_retries") == 0


async def test_chunks_that_found_the_queue_full_are_sent_later(
    worker: Worker, start_ps: Callable[[], FakePs]
) -> None:
    worker.ps.joined = False
    worker.ps.window_nbytes = 1 << 30
    asked = worker.ask(PUSH, sequence=1, chunks=chunks(100))
    await asyncio.sleep(0)
    ps = start_ps()
    ps.alive = HeartbeatReply(received=0, answered=0)
    worker.ps.joined = True
    (push,) = await ps.first(Push)
    assert indices(ps.received)[-101:] == [*range(100), -1]
    ps.reply(push, RELEASE)
    assert (await within(asked)).message == RELEASE


@pytest.mark.parametrize(
    ("message", "options", "reply"),
    [(PUSH, {"sequence": 1}, RELEASE), (Pull(), {}, PullReply(0)), (Read(), {}, Parameters(1))],
    ids=lambda value: type(value).__name__,
)
async def test_chunks_ahead_of_a_reply_are_taken_in_before_it(
    worker: Worker, ps: FakePs, message: Message, options: dict[str, Any], reply: Message
) -> None:
    out = nothing(3)
    asked = worker.ask(message, out=out, **options)
    (request,) = await ps.first(type(message))
    answer(ps, request, reply, 3)
    assert (await within(asked)).message == reply
    assert laid(out) == [0, 1, 2]


@pytest.mark.parametrize("lost", [{0}, {2}, {0, 1}, {0, 1, 2}])
async def test_answer_without_all_chunks_is_lost_and_the_push_is_sent_again(
    worker: Worker, ps: FakePs, lost: set[int]
) -> None:
    out = nothing(3)
    asked = worker.ask(PUSH, sequence=1, out=out)
    (push,) = await ps.first(Push)
    answer(ps, push, RELEASE, 3, lost)
    ps.alive = HeartbeatReply(received=1, answered=1)
    (_, again) = await ps.first(Push, 2)
    assert not asked.done()
    answer(ps, again, RELEASE, 3)
    assert (await within(asked)).message == RELEASE
    assert laid(out) == [0, 1, 2]


@pytest.mark.usefixtures("resends_at_once")
async def test_read_without_all_chunks_is_sent_again(worker: Worker, ps: FakePs) -> None:
    out = nothing(3)
    asked = worker.ask(Read(), out=out)
    (read,) = await ps.first(Read)
    answer(ps, read, Parameters(5), 3, {1})
    again = (await ps.first(Read, 2))[1]
    answer(ps, again, Parameters(6), 3)
    assert (await within(asked)).message == Parameters(6)
    assert laid(out) == [0, 1, 2]


@pytest.mark.parametrize("version", [1, 2])
async def test_chunks_of_an_earlier_answer_count_if_their_version_is_the_same(
    worker: Worker, ps: FakePs, version: int
) -> None:
    asked = worker.ask(PUSH, sequence=1, out=nothing(3))
    (push,) = await ps.first(Push)
    answer(ps, push, RELEASE, 3, {1})
    answer(ps, push, PushReply(1, "applied", version), 3, {0, 2})
    answer(ps, push, PushReply(1, "applied", 3), 3)
    assert (await within(asked)).message.version == {1: 1, 2: 3}[version]


@pytest.mark.parametrize("earlier", [False, True], ids=["alone", "behind an earlier chunk"])
@pytest.mark.parametrize("lost", [{0, 1, 2}, {1}, set()], ids=["none", "part", "all"])
async def test_answer_that_stops_a_worker_may_come_without_its_parameters(
    worker: Worker, ps: FakePs, lost: set[int], earlier: bool
) -> None:
    begun = worker.ps.begin(PUSH, sequence=1, out=nothing(3), reason="it has not answered")
    (push,) = await ps.first(Push)
    if earlier:
        answer(ps, push, RELEASE, 3, {1, 2})
    stop = PushReply(1, "applied", 2, stop=True)
    answer(ps, push, stop, 3, lost)
    assert (await within(begun.future)).message == stop
    assert begun.has_parameters == (not lost)
    worker.ps.end(begun)


@pytest.mark.parametrize(("count", "tensors"), [(1, 0), (1, 2), (3, 1)])
async def test_answer_with_more_or_less_inline_than_the_parameters_fails(
    worker: Worker, ps: FakePs, count: int, tensors: int
) -> None:
    out = nothing(count)
    asked = worker.ask(Read(), out=out)
    (read,) = await ps.first(Read)
    ps.reply(read, Parameters(1), tensors * (Tensor.of(out),))
    with pytest.raises(ProtocolError, match=f"{tensors} tensors"):
        await within(asked)


ONE = (Tensor.of(np.zeros(NBYTES // 4, np.float32)),)


@pytest.mark.parametrize(
    ("out", "tensors", "text"),
    [
        (None, ONE, "ps 0 sent a chunk that was not asked for"),
        (nothing(5), (), "got 0 tensors, expected one of 100 elements"),
        (nothing(5), 2 * ONE, "got 2 tensors, expected one of 100 elements"),
        (nothing(4), ONE, "chunk 4 of 4"),
    ],
)
@pytest.mark.parametrize(
    ("message", "options"), [(PUSH, {"sequence": 1}), (Read(), {})], ids=["push", "read"]
)
async def test_chunk_that_is_not_wanted_fails_the_request_alone(
    worker: Worker,
    ps: FakePs,
    message: Message,
    options: dict[str, Any],
    out: Flat | None,
    tensors: tuple[Tensor, ...],
    text: str,
) -> None:
    asked = worker.ask(message, out=out, **options)
    other = worker.ask(Pull(), sequence=0)
    (request,) = await ps.first(type(message))
    for _ in range(2):
        ps.reply(request, Chunk(0, 4), tensors)
    ps.reply(request, RELEASE)
    with pytest.raises(ProtocolError) as caught:
        await within(asked)
    assert str(caught.value) == text
    ps.reply((await ps.first(Pull))[0], RELEASE)
    assert (await within(other)).message == RELEASE


@pytest.mark.parametrize("late", [Chunk(1, 1), ChunksReceived(NBYTES)], ids=["chunk", "taken"])
async def test_messages_behind_a_reply_are_dropped(
    worker: Worker, ps: FakePs, late: Message
) -> None:
    out = nothing(2)
    asked = worker.ask(PUSH, sequence=1, chunks=chunks(2), out=out)
    ps.alive = None
    (chunk,) = await ps.first(Chunk)
    answer(ps, chunk, RELEASE, 2)
    ps.reply(chunk, late, ONE)  # before the request has ended
    assert (await within(asked)).message == RELEASE
    sent = await settled(ps)
    ps.reply(chunk, late, ONE)  # and after
    assert await settled(ps) == sent
    assert laid(out) == [0, 1]


async def test_request_that_is_being_answered_is_not_sent_again(
    worker: Worker, ps: FakePs, stop_clock: StopClock
) -> None:
    worker.on_beat = stop_clock(link_module).tick
    count = 3 * int(link_module.RESEND_S)
    asked = worker.ask(Read(), out=nothing(count))
    (request,) = await ps.first(Read)
    for index in range(count):
        ps.reply(request, Chunk(1, index), ONE)
        await ps.next(Heartbeat)
    assert len(ps.of(Read)) == 1
    (_, again) = await ps.first(Read, 2)
    ps.reply(again, Parameters(1))
    assert (await within(asked)).message == Parameters(1)


async def test_request_that_is_begun_without_its_message_sends_chunks_as_they_come(
    worker: Worker, ps: FakePs
) -> None:
    ps.alive = HeartbeatReply(received=0, answered=0)  # proves no loss without a push
    worker.ps.window_nbytes = 4 * NBYTES
    ahead = chunks(5, in_order=False)
    begun = worker.ps.begin(None, chunks=ahead, sequence=1, reason="it is computed")
    assert await settled(ps) == []
    ahead.add([3, 4])
    worker.ps.go_on(begun)
    assert await settled(ps) == [3, 4]
    ahead.add([4, 0])
    worker.ps.go_on(begun)
    assert await settled(ps) == [3, 4, 0]
    ps.alive = HeartbeatReply(received=1, answered=0)
    worker.ps.complete(begun, PUSH, with_chunks=True)
    assert await settled(ps) == [3, 4, 0, 1]
    ps.reply(ps.of(Chunk)[0], ChunksReceived(4 * NBYTES))
    assert await settled(ps) == [3, 4, 0, 1, 2, -1]
    assert [chunk.tensors[0].array()[0] for chunk in ps.of(Chunk)] == [3, 4, 0, 1, 2]
    (push,) = ps.of(Push)
    assert push.message == PUSH
    ps.reply(push, RELEASE)
    assert (await begun.future).message == RELEASE
    worker.ps.end(begun)


async def test_request_can_be_completed_without_its_remaining_chunks(
    worker: Worker, ps: FakePs
) -> None:
    ps.alive = HeartbeatReply(received=1, answered=0)
    worker.ps.window_nbytes = 4 * NBYTES
    ahead = chunks(3, in_order=False)
    begun = worker.ps.begin(None, chunks=ahead, sequence=1, reason="it is computed")
    ahead.add([2])
    worker.ps.go_on(begun)
    worker.ps.complete(begun, PUSH, with_chunks=False)
    assert await settled(ps) == [2, -1]
    worker.ps.end(begun)
