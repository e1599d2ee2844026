"""Faults that only sockets can have."""

from __future__ import annotations

import asyncio
import re
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from typing import TypeAlias

import numpy as np
import pytest
import zmq

from tests.constants import Constants
from tests.harness import Stage
from tests.transport.conftest import Lane
from zmqtrain.errors import ConfigError
from zmqtrain.transport import router_dealer
from zmqtrain.transport.framing import MAX_FRAME_NBYTES
from zmqtrain.transport.router_dealer import ZmqTransport
from zmqtrain.transport.security import Security

Deaf: TypeAlias = Callable[[], AbstractContextManager[None]]

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
EXABYTES = b"\x02" + (1 << 62).to_bytes(8, "big")  # the header of a frame


@asynccontextmanager
async def plain_connection(
    address: str,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, port = address.removeprefix("tcp://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def test_frame_above_the_limit_ends_that_connection_alone(tcp: Lane) -> None:
    listener, inbox = tcp.listen()
    bad, _ = tcp.peer(listener.address)
    good, answers = tcp.peer(listener.address)
    good.send([b"before"])
    await inbox.first(1)
    bad.send([b"header", bytes(MAX_FRAME_NBYTES + 1)])
    async with asyncio.timeout(10):
        while [b"sorry"] not in inbox.messages:
            bad.send([b"sorry"])
            await asyncio.sleep(0.02)
    good.send([b"after"])
    async with asyncio.timeout(10):
        while [b"after"] not in inbox.messages:
            await inbox.first(len(inbox.messages) + 1)
    by_good = [m for p, m in zip(inbox.peers, inbox.messages, strict=True) if p == inbox.peers[0]]
    assert by_good == [[b"before"], [b"after"]]
    assert all(len(message) == 1 for message in inbox.messages)
    listener.send([b"still there"], inbox.peers[0])
    assert await answers.first(1) == [[b"still there"]]


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"GET /metrics HTTP/1.1\r\nHost: ps-0\r\n\r\n" * 100,
        np.random.default_rng(0).bytes(1 << 16),
        GREETING[:12],
        GREETING[:12] + bytes(200),
        GREETING + np.random.default_rng(1).bytes(1 << 16),
        GREETING + READY + np.random.default_rng(2).bytes(1 << 16),
    ],
)
async def test_garbage_on_the_port_disturbs_no_peer(tcp: Lane, garbage: bytes) -> None:
    listener, inbox, peer, answers = await tcp.pair()
    async with plain_connection(listener.address) as (_, writer):
        writer.write(garbage)
        for number in range(5):
            peer.send([b"%d" % number])
            listener.send([b"%d" % number], inbox.peers[0])
        await answers.first(5)
    late, late_answers = tcp.peer(listener.address)
    late.send([b"late"])
    async with asyncio.timeout(10):
        while [b"late"] not in inbox.messages:
            await inbox.first(len(inbox.messages) + 1)
    listener.send([b"welcome"], inbox.peers[inbox.messages.index([b"late"])])
    assert await late_answers.first(1) == [[b"welcome"]]
    by_peer = [m for p, m in zip(inbox.peers, inbox.messages, strict=True) if p == inbox.peers[0]]
    assert by_peer == [[b"before"], *([b"%d" % number] for number in range(5))]


async def test_address_of_another_connection_cannot_be_taken(tcp: Lane) -> None:
    listener, inbox, good, answers = await tcp.pair()
    with zmq.Context() as context, context.socket(zmq.DEALER) as thief:
        thief.setsockopt(zmq.IDENTITY, inbox.peers[0])
        thief.setsockopt(zmq.LINGER, 0)
        with thief.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED) as connected:
            thief.connect(listener.address)
            thief.send_multipart([b"noise"])
            assert await asyncio.to_thread(connected.poll, 10_000)
        good.send([b"after"])
        await inbox.first(2)
        listener.send([b"answer"], inbox.peers[1])
        await answers.first(1)
    assert inbox.messages == [[b"before"], [b"after"]]
    assert answers.messages == [[b"answer"]]


async def test_claimed_frame_of_exabytes_ends_its_connection(tcp: Lane) -> None:
    listener, inbox = tcp.listen()
    async with plain_connection(listener.address) as (reader, writer):
        writer.write(GREETING + READY + EXABYTES)
        async with asyncio.timeout(10):
            await reader.read()
    await tcp.reaches(listener.address, inbox)


@pytest.fixture
def deaf(monkeypatch: pytest.MonkeyPatch) -> Deaf:
    """Endpoints started within it are never woken by their socket."""

    @contextmanager
    def never_woken() -> Iterator[None]:
        with monkeypatch.context() as loop:
            loop.setattr(asyncio.get_running_loop(), "add_reader", lambda *_: None)
            yield

    return never_woken


async def test_missed_wake_up_is_made_good_by_the_watchdog(
    tcp: Lane, deaf: Deaf, constants: Constants
) -> None:
    constants(router_dealer, WATCHDOG_S=0.01)
    with deaf():
        listener, inbox = tcp.listen()
    peer, _ = tcp.peer(listener.address)
    peer.send([b"hello"])
    assert await inbox.first(1) == [[b"hello"]]
    peer.send([b"again"])
    assert await inbox.first(2) == [[b"hello"], [b"again"]]


async def test_wake_up_swallowed_by_a_send_is_made_good_by_it(
    tcp: Lane, deaf: Deaf, constants: Constants
) -> None:
    constants(router_dealer, WATCHDOG_S=1000)
    listener = tcp.bind()
    listener.start(lambda peer, frames: listener.send(frames, peer))
    with deaf():
        peer, inbox = tcp.peer(listener.address)
    async with asyncio.timeout(10):
        while not inbox.messages:
            await tcp.send(peer, [b"hello"])
            await asyncio.sleep(0.001)
    assert inbox.messages[0] == [b"hello"]


def test_messages_that_are_discarded_do_not_keep_the_process(stage: Stage) -> None:
    """Which would wait for ever otherwise."""
    (port,) = stage.free_ports(1)
    script = stage.directory / "script.py"
    script.write_text(f"""
from zmqtrain.transport.router_dealer import ZmqTransport
from zmqtrain.transport.security import Security
transport = ZmqTransport(Security(insecure=True), linger_ms=-1)
peer = transport.connect("tcp://127.0.0.1:{port}")
peer.send([b"hello"])
peer.close(discard=True)
transport.close()
""")
    process = stage.start("script", sys.executable, script)
    assert process.exit_code() == 0, str(process)


async def test_address_that_cannot_be_bound_is_refused_with_the_reason() -> None:
    transport = ZmqTransport(Security(insecure=True))
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:5555: Cannot assign requested address"):
        transport.bind("tcp://192.0.2.1:5555")
    transport.close()


async def test_ipv6_addresses_are_served(tcp: Lane) -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this host has no IPv6")
    listener, inbox = tcp.listen("tcp://[::1]:0")
    assert re.fullmatch(r"tcp://\[::1\]:[1-9]\d+", listener.address)
    await tcp.reaches(listener.address, inbox)


async def test_wake_ups_in_a_burst_make_no_turn_of_the_loop_longer(
    tcp: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = tcp.bind()
    peers = [tcp.peer(listener.address)[0] for _ in range(20)]
    for peer in peers:
        for _ in range(50):
            await tcp.send(peer, [b"hello"])
    handled = 0

    def on_message(*_: object) -> None:
        nonlocal handled
        handled += 1

    wake_ups: list[Callable[[], None]] = []
    with monkeypatch.context() as loop:
        loop.setattr(
            asyncio.get_running_loop(), "add_reader", lambda _, wake_up: wake_ups.append(wake_up)
        )
        listener.start(on_message)
    most = 0
    async with asyncio.timeout(10):
        while handled < 20 * 50:
            before = handled
            wake_ups[0]()
            await asyncio.sleep(0)
            most = max(most, handled - before)
    assert 0 < most <= 2 * router_dealer.BURST
