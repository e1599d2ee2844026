"""An actor's life: what it answers, what ends it, and what it leaves behind."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.actors.conftest import Client, Worker
from tests.limits import within
from zmqtrain.actors.actor import Actor, Request, leaves_of, main_of
from zmqtrain.config.cluster import Role, Task
from zmqtrain.config.timing import Timing
from zmqtrain.errors import ConfigError, PeerLostError, RefusedError
from zmqtrain.observe.metrics import Metrics
from zmqtrain.transport.base import UnreachableError
from zmqtrain.transport.memory import MemoryTransport
from zmqtrain.wire.chunks import CHUNK_SIZE
from zmqtrain.wire.codec import Sender
from zmqtrain.wire.control import GetStatus, Shutdown
from zmqtrain.wire.messages import (
    PROTOCOL_VERSION,
    Done,
    Heartbeat,
    HeartbeatReply,
    Leave,
    Parameters,
    Pull,
    Push,
    PushReply,
    Read,
    Refusal,
)

Clients = Callable[..., Client]

ADDRESS = "tcp://ps-0:2222"
PUSH = Push(1, 0, 7, 32, 0.5)
RELEASE = PushReply(1, "applied", 1)


VERSION_99 = (
    f"the peer speaks protocol version 99, this task version {PROTOCOL_VERSION}: install the same "
    "zmqtrain on every host"
)


class Bug(Exception):
    """Nobody meant to raise this."""


class Ps(Actor):
    """Answers some messages, refuses some, and has a bug."""

    def __init__(self, transport: MemoryTransport, timing: Timing) -> None:
        super().__init__(Task(Role.PS, 0), transport, Metrics("ps"), timing)
        self.incarnation, self.generation = 4, 2
        self.listening = asyncio.Event()
        self.life: asyncio.Task[int]
        self.beats: asyncio.Queue[Heartbeat] = asyncio.Queue()
        self.pushes: asyncio.Queue[Request] = asyncio.Queue()
        self.refused = ConfigError("lr is -1; expected more than 0; raise it")
        self.bug = Bug("off by one")
        self.handlers[GetStatus] = lambda request, _: request.reply(
            Done(f"seen by {request.sender}")
        )
        self.handlers[Heartbeat] = self._on_heartbeat
        self.handlers[Leave] = self._refuse
        self.handlers[Read] = self._stumble
        self.handlers[Push] = lambda request, _: self.pushes.put_nowait(request)

    async def main(self) -> int:
        self.listen(ADDRESS)
        self.listening.set()
        await self.stopping.wait()
        return self.stop_code

    def _on_heartbeat(self, request: Request, beat: Heartbeat) -> None:
        self.beats.put_nowait(beat)
        request.reply(HeartbeatReply())

    def _refuse(self, request: Request, _: Leave) -> None:
        raise self.refused

    def _stumble(self, request: Request, _: Read) -> None:
        raise self.bug


Run = Callable[[Actor], asyncio.Task[int]]


@pytest.fixture
async def ps(transport: MemoryTransport, timing: Timing, run: Run) -> Ps:
    ps = Ps(transport, timing)
    ps.life = run(ps)
    await within(ps.listening.wait())
    return ps


async def test_request_is_answered_to_its_sender_alone(ps: Ps, client: Clients) -> None:
    clients = [client(ADDRESS, index=index) for index in range(3)]
    for index, peer in enumerate(clients):
        peer.send(GetStatus(), request_id=10 + index)
    for index, peer in enumerate(clients):
        (reply,) = await peer.first(Done)
        assert reply.message == Done(f"seen by worker {index}")
        assert (reply.request_id, reply.generation) == (10 + index, 2)
        assert reply.sender == Sender("ps", 0, 4)
        assert len(peer.received) == 1


async def test_failed_actor_answers_nothing_while_it_ends(ps: Ps, client: Clients) -> None:
    """What it would need for that may never have been there."""
    failed, ended = asyncio.Event(), asyncio.Event()

    async def end_slowly() -> None:
        try:
            await ended.wait()
        finally:
            failed.set()
            await within(ended.wait())

    peer = client(ADDRESS)
    ps.spawn(end_slowly())
    ps.crash(ps.refused)
    await within(failed.wait())
    peer.send(GetStatus(), request_id=7)
    for _ in range(10):
        await asyncio.sleep(0)
    ended.set()
    with pytest.raises(ConfigError):
        await within(ps.life)
    assert not peer.received


async def test_refused_request_disturbs_no_other_peer(ps: Ps, client: Clients) -> None:
    peer, other = client(ADDRESS), client(ADDRESS, index=1)
    peer.send(Leave(""), request_id=7)
    (refusal,) = await peer.first(Refusal)
    assert refusal.request_id == 7
    assert refusal.message == Refusal("ConfigError", "lr is -1; expected more than 0; raise it")
    for asker in (peer, other):
        asker.send(GetStatus(), request_id=8)
        await asker.first(Done)
    assert not ps.life.done()


async def test_refused_message_that_asked_for_no_reply_gets_none(ps: Ps, client: Clients) -> None:
    peer = client(ADDRESS)
    peer.send(Leave(""), request_id=0)
    peer.send(Pull(), request_id=0)
    peer.send(GetStatus(), request_id=8)
    await peer.first(Done)
    assert len(peer.received) == 1


async def test_message_that_the_task_does_not_take_is_refused(ps: Ps, client: Clients) -> None:
    peer = client(ADDRESS, index=5)
    peer.send(Pull(), request_id=3)
    (refusal,) = await peer.first(Refusal)
    assert refusal.message == Refusal("ProtocolError", "ps 0 takes no Pull from worker 5")
    assert refusal.request_id == 3
    assert not ps.life.done()


@pytest.mark.parametrize(
    ("frames", "request_id", "text"),
    [
        ([b"\xc1"], 0, "the header is not msgpack within limits: FormatError"),
        ([b"\x97\x63\xa4Pull\x05\x93\xa6worker\x00\x01\x00\x90\x90"], 5, VERSION_99),
    ],
)
async def test_undecodable_message_is_refused_and_counted(
    ps: Ps, client: Clients, frames: list[bytes], request_id: int, text: str
) -> None:
    peer, other = client(ADDRESS), client(ADDRESS, index=1)
    peer.send_frames(frames)
    (refusal,) = await peer.first(Refusal)
    assert refusal.request_id == request_id
    assert refusal.message == Refusal("ProtocolError", text)
    assert ps.metrics.registry.get_sample_value("zmqtrain_decode_errors_total") == 1
    for asker in (peer, other):
        asker.send(GetStatus(), request_id=8)
        await asker.first(Done)
    assert not ps.life.done()


async def test_stopped_actor_ends_with_the_first_code_and_leaves_nothing(
    transport: MemoryTransport, timing: Timing, run: Run, client: Clients
) -> None:
    ended: list[str] = []

    async def background(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(name)

    ps = Ps(transport, timing)
    ps.add_background_task(partial(background, "companion"))
    ps.life = run(ps)
    await within(ps.listening.wait())
    ps.spawn(background("spawned"))
    peer = client(ADDRESS)
    peer.send(Push(1, 0, 0, 1, 0.0), request_id=1)
    peer.send(GetStatus(), request_id=2)
    await peer.first(Done)
    ps.stop(70)
    ps.stop(0)
    assert await within(ps.life) == 70
    assert sorted(ended) == ["companion", "spawned"]
    ps.pushes.get_nowait().reply(RELEASE)
    transport.bind(ADDRESS).close()
    assert len(peer.received) == 1


async def test_links_are_closed_with_the_actor(ps: Ps, start_worker: Callable[..., Any]) -> None:
    worker = await start_worker()
    link = worker.ps
    worker.stop(0)
    with pytest.raises(PeerLostError, match="the link to ps 0 was closed"):
        await within(link.silence())
    with pytest.raises(UnreachableError):
        link.endpoint.send([b"hello"])


async def fail(error: Exception) -> None:
    raise error


async def test_failed_background_task_ends_the_actor_with_its_error(
    ps: Ps, transport: MemoryTransport
) -> None:
    lost = PeerLostError("ps 1 is gone")
    ps.spawn(fail(lost))
    with pytest.raises(PeerLostError) as caught:
        await within(ps.life)
    assert caught.value is lost
    transport.bind(ADDRESS).close()


async def test_group_of_errors_yields_the_one_raised_on_purpose() -> None:
    purpose, bug = PeerLostError("ps 0 is gone"), Bug("follow-up")
    nested = BaseExceptionGroup("", [BaseExceptionGroup("", [bug]), ExceptionGroup("", [purpose])])
    assert main_of(leaves_of(nested)) is purpose
    assert main_of([bug, Bug("second")]) is bug


async def test_crash_counts_in_the_turn_in_which_the_actor_ends(ps: Ps) -> None:
    ps.stop(0)
    ps.crash(ps.bug)
    with pytest.raises(Bug, match="off by one"):
        await within(ps.life)


async def test_bug_beside_an_error_raised_on_purpose_is_logged(
    ps: Ps, caplog: pytest.LogCaptureFixture
) -> None:
    ps.spawn(fail(PeerLostError("ps 1 is gone")))
    ps.crash(ps.bug)
    ps.crash(Bug("second"))
    with pytest.raises(PeerLostError):
        await within(ps.life)
    logged = [each.getMessage() for each in caplog.records]
    text = "ps 0 met another error while it ended: "
    assert logged == [text + "second", text + "off by one"]


async def test_actor_that_has_crashed_handles_no_further_message(ps: Ps, client: Clients) -> None:
    """Its state may be half changed, and what it would answer wrong."""
    peer = client(ADDRESS)
    peer.send(Read(), request_id=6)
    peer.send(GetStatus(), request_id=7)
    with pytest.raises(Bug) as caught:
        await within(ps.life)
    assert caught.value is ps.bug
    assert peer.received == []


async def test_background_task_needs_a_running_actor(
    transport: MemoryTransport, timing: Timing
) -> None:
    coroutine: Coroutine[Any, Any, None] = fail(Bug(""))
    with pytest.raises(RuntimeError, match="spawn is for a running actor"):
        Ps(transport, timing).spawn(coroutine)
    coroutine.close()


async def test_heartbeats_carry_the_waits_of_the_worker(ps: Ps, worker: Worker) -> None:
    asked = worker.ask(PUSH, reason="it has not answered push 1", sequence=1)
    push = await within(ps.pushes.get())
    while not (waits := (await within(ps.beats.get())).waits):
        pass
    assert [(wait.owner, wait.peer) for wait in waits] == [("worker 3", "ps 0")]
    assert waits[0].reason == "it has not answered push 1"
    push.reply(RELEASE)
    assert (await within(asked)).message == RELEASE


@pytest.mark.parametrize("size", [0, 5, CHUNK_SIZE, CHUNK_SIZE + 1, 2 * CHUNK_SIZE])
async def test_reply_brings_an_array_of_any_size(ps: Ps, worker: Worker, size: int) -> None:
    flat = np.arange(size, dtype=np.float32)
    out = np.full(size, -1, np.float32)
    ps.handlers[GetStatus] = lambda request, _: request.reply_with(Parameters(3), flat)
    reply = await within(worker.ask(GetStatus(), out=out))
    assert reply.message == Parameters(3)
    assert bool(reply.tensors) == (size <= CHUNK_SIZE)
    assert out.tobytes() == flat.tobytes()


async def test_second_answer_to_a_push_does_not_answer_the_next_one(
    ps: Ps, start_worker: Callable[..., Any]
) -> None:
    worker = await start_worker(joined=False)  # no heartbeat may cause a resend
    first = worker.ask(PUSH, sequence=1)
    answered = await within(ps.pushes.get())
    answered.reply(RELEASE)
    await within(first)
    second = worker.ask(PUSH, sequence=2)
    push = await within(ps.pushes.get())
    answered.reply(RELEASE)
    answered.send(Shutdown(0, "barrier"))
    await within(worker.told.get())
    worker.ps.send(PUSH)  # comes behind whatever the second answer brought about
    (await within(ps.pushes.get())).send(Shutdown(0, "barrier"))
    await within(worker.told.get())
    push.reply(RELEASE)
    assert (await within(second)).message == RELEASE


class Ending(Actor):
    """Does something while it ends."""

    def __init__(self, last: Callable[[Ending], None]) -> None:
        super().__init__(Task(Role.PS, 0), MemoryTransport(), Metrics("ps"), Timing())
        self._last = last
        self.is_done = False

    async def main(self) -> int:
        self.spawn(self._linger())
        await asyncio.sleep(0)
        raise PeerLostError("ps 1 is gone")

    async def _linger(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self._last(self)
            self.is_done = True

    async def work(self) -> None:
        raise AssertionError("it is too late for that")


async def test_actor_that_is_ending_begins_nothing() -> None:
    ending = Ending(lambda actor: actor.spawn(actor.work()))
    with pytest.raises(PeerLostError, match="ps 1 is gone"):
        await ending.run()
    assert ending.is_done


@pytest.mark.parametrize(
    ("error", "level"),
    [(ValueError("a bug"), logging.ERROR), (RefusedError("another job"), logging.INFO)],
)
async def test_bug_that_is_met_while_an_actor_ends_is_an_error_and_the_rest_is_not(
    caplog: pytest.LogCaptureFixture, error: Exception, level: int
) -> None:
    with pytest.raises(PeerLostError, match="ps 1 is gone"), caplog.at_level(logging.INFO):
        await Ending(lambda actor: actor.crash(error)).run()
    (told,) = [record for record in caplog.records if str(error) in record.getMessage()]
    assert (told.levelno, bool(told.exc_info)) == (level, level == logging.ERROR)
