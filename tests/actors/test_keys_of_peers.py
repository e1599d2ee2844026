"""Endpoints that tell of failures, and peers with keys: what links and actors make of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from zmqtrain.actors.actor import Actor, Request
from zmqtrain.actors.client import Client
from zmqtrain.actors.link import Link
from zmqtrain.config.cluster import Role, Task
from zmqtrain.config.timing import Timing
from zmqtrain.errors import PeerLostError, RefusedError
from zmqtrain.observe.metrics import Metrics
from zmqtrain.transport.base import OnFailure, OnMessage, RoutingId, UnreachableError
from zmqtrain.transport.keys import Owner
from zmqtrain.transport.registry import Key, KnownPeer
from zmqtrain.wire.buffers import Buffer
from zmqtrain.wire.codec import Envelope, Sender, decode, encode
from zmqtrain.wire.control import GetStatus, RequestSave, RequestStop, SwitchPolicy
from zmqtrain.wire.messages import Done, Message, Push, Refusal

PUSH = Push(1, 0, 7, 32, 0.5)


class ScriptedEnd:
    """An endpoint whose messages and failures come from the test."""

    address = "tcp://ps-0:2222"

    def __init__(self) -> None:
        self.sent: list[tuple[RoutingId, Envelope]] = []
        self.deliver: OnMessage
        self.failure: OnFailure

    def start(self, on_message: OnMessage) -> None:
        self.deliver = on_message

    def on_failure(self, callback: OnFailure) -> None:
        self.failure = callback

    def send(self, frames: Sequence[Buffer], peer: RoutingId = b"") -> None:
        if isinstance(peer, KnownPeer) and not peer.key.allowed:
            raise UnreachableError("the key is no longer allowed")
        self.sent.append((peer, decode(frames)))

    def close(self, *, discard: bool = False) -> None:
        pass


class ScriptedTransport:
    def __init__(self) -> None:
        self.end = ScriptedEnd()

    def bind(self, address: str, high_water_mark: int = 64) -> ScriptedEnd:
        return self.end

    def connect(self, address: str) -> ScriptedEnd:
        return self.end

    def close(self) -> None:
        pass


@pytest.fixture
def end() -> ScriptedEnd:
    return ScriptedEnd()


@pytest.fixture
async def link(end: ScriptedEnd) -> AsyncIterator[Link]:
    link = Link("ps 0", end, Client(3, 60.0))
    yield link
    link.close()


async def test_end_that_is_not_let_in_fails_every_request_with_the_reason(
    link: Link, end: ScriptedEnd
) -> None:
    under_way = asyncio.ensure_future(link.request(GetStatus(), reason="it is asked"))
    silence = asyncio.ensure_future(link.silence())
    await asyncio.sleep(0)
    end.failure("it does not admit the key of worker 3", True)
    for waiting in (under_way, silence, link.request(GetStatus(), reason="again")):
        with pytest.raises(RefusedError) as caught:
            await waiting
        assert str(caught.value) == (
            "ps 0 at tcp://ps-0:2222: it does not admit the key of worker 3"
        )


async def test_passing_trouble_is_logged_once_and_explains_a_deadline(
    link: Link, end: ScriptedEnd, caplog: pytest.LogCaptureFixture
) -> None:
    asked = asyncio.ensure_future(link.request(GetStatus(), reason="it is asked", timeout_s=0.05))
    await asyncio.sleep(0)
    for _ in range(3):
        end.failure("it closes every connection immediately", False)
    with pytest.raises(PeerLostError, match=r"0\.05 s .*: it closes every connection immediately"):
        await asked
    told = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [record.getMessage() for record in told] == [
        "ps 0 at tcp://ps-0:2222: it closes every connection immediately"
    ]


class Ps(Actor):
    """Takes pushes, and notes whose."""

    def __init__(self, transport: ScriptedTransport) -> None:
        super().__init__(Task(Role.PS, 0), transport, Metrics("ps"), Timing())
        self.handlers[Push] = self._take
        self.handlers[GetStatus] = self._take
        self.taken: list[Request] = []

    async def main(self) -> int:
        return 0

    def _take(self, request: Request, message: Message) -> None:
        self.taken.append(request)
        request.reply(Done())


@pytest.fixture
def ps() -> Ps:
    ps = Ps(ScriptedTransport())
    ps.listen("tcp://ps-0:2222")
    return ps


def say(ps: Any, key: Key, message: Message, role: str, index: int) -> Any:
    """Have the holder of a key send a message under a name; return the answer."""
    end = ps.transport.end
    peer = key.peer(b"routing id")
    end.deliver(peer, encode(Envelope(message, Sender(role, index), request_id=5)))
    name, answer = end.sent.pop()
    assert name == peer
    return answer.message


def turned_away(ps: Ps) -> float | None:
    return ps.metrics.registry.get_sample_value("zmqtrain_auth_failures_total")


async def test_holder_of_a_key_may_send_only_in_its_own_name(
    ps: Ps, caplog: pytest.LogCaptureFixture
) -> None:
    key = Key(Owner("worker", 3), "a" * 64)
    assert say(ps, key, PUSH, "worker", 3) == Done()
    wrong = "the key of worker 3 is not that of {}: give each task its own secret key"
    for role, index in (("worker", 4), ("ps", 0), ("chief", 0), ("client", 3), ("worker", 4)):
        answer = say(ps, key, PUSH, role, index)
        assert answer == Refusal("RefusedError", wrong.format(f"{role} {index}"))
    assert len(ps.taken) == 1
    assert turned_away(ps) == 5
    told = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(told) == 4  # the last refusal was told before


async def test_client_may_be_any_process(ps: Ps) -> None:
    key = Key(Owner("client", 1), "a" * 64)
    assert say(ps, key, GetStatus(), "client", 4711) == Done()
    assert say(ps, key, PUSH, "client", 4711).text == (
        "client 4711 may not send Push, which is for a worker"
    )


async def test_key_of_a_task_may_ask_for_the_status_as_a_client_and_do_no_more(ps: Ps) -> None:
    key = Key(Owner("worker", 3), "a" * 64)
    assert say(ps, key, GetStatus(), "client", 4711) == Done()
    for message in (SwitchPolicy("hogwild"), RequestSave(), RequestStop()):
        assert "is not that of client 4711" in say(ps, key, message, "client", 4711).text
    assert "is not that of chief 0" in say(ps, key, GetStatus(), "chief", 0).text


async def test_request_is_revoked_with_the_key_of_its_sender(ps: Ps) -> None:
    key = Key(Owner("worker", 3), "a" * 64)
    say(ps, key, PUSH, "worker", 3)
    (request,) = ps.taken
    assert not request.is_revoked
    key.allowed = False
    assert request.is_revoked
    request.reply(Done())  # to nobody
    assert ps.transport.end.sent == []
