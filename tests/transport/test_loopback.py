"""Loopback without keys: tasks of one user are served, other users are strangers at both ends."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import zmq

from tests.rights import as_nobody, needs_another_user
from tests.transport.conftest import Inbox, Keyed, Lane, Troubles, lane_of
from zmqtrain.errors import ConfigError
from zmqtrain.transport.by_address import TransportByAddress
from zmqtrain.transport.framing import heading
from zmqtrain.transport.greeting import CURVE, NULL, UNIX, greeting
from zmqtrain.transport.keys import Owner
from zmqtrain.transport.loopback import place_of
from zmqtrain.transport.security import Security

LIMIT_S = 10.0
REFUSED = "user 65534 of this host connected; only its own user may"
MESSAGE = heading([b"stop"]) + b"stop"


@pytest.fixture
async def loopback() -> AsyncIterator[Lane]:
    async for lane in lane_of("loopback"):
        yield lane


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def said_at(end: socket.socket) -> bytes:
    """Return all that comes until the other end closes the connection."""
    end.settimeout(LIMIT_S)
    said = b""
    with contextlib.suppress(ConnectionResetError):
        while data := end.recv(1000):
            said += data
    return said


def by_the_port(address: str) -> str:
    """Send a message by TCP."""
    with socket.create_connection(("127.0.0.1", port_of(address))) as end:
        with contextlib.suppress(ConnectionError):
            end.send(MESSAGE)
        return repr(said_at(end) == greeting(UNIX))


def by_zeromq(address: str) -> str:
    """Send a message as a task of an earlier version does."""
    context = zmq.Context()
    end = context.socket(zmq.DEALER)
    events = end.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
    end.connect(address)
    end.send(b"stop")
    refused = bool(events.poll(int(1000 * LIMIT_S)))
    context.destroy(linger=0)
    return repr(refused)


def by_the_socket(address: str) -> str:
    """Send a message to the Unix socket of the address."""
    with socket.socket(socket.AF_UNIX) as end:
        end.connect(place_of(address))
        with contextlib.suppress(ConnectionError):
            end.send(MESSAGE)
        return repr(said_at(end) == b"")


def as_a_task(address: str, security: Security | None = None) -> str:
    """Connect as a task does, and return why that is refused for good."""

    async def knock() -> str:
        transport = TransportByAddress(security, linger_s=0)
        peer, troubles = transport.connect(address), Troubles()
        peer.start(Inbox())
        peer.on_failure(troubles)
        peer.send([b"stop"])
        text, _ = await troubles.last()
        transport.close()
        return text

    return asyncio.run(knock())


@needs_another_user
@pytest.mark.parametrize(
    ("door", "answer", "told"),
    [
        (by_the_port, "True", ""),
        (by_zeromq, "True", ""),
        (by_the_socket, "True", REFUSED),
        (
            as_a_task,
            (
                "it belongs to user 0, and this task to user 65534; run both as one user, or make "
                "keys (zmqtrain keys new) and give both --keys DIR"
            ),
            REFUSED,
        ),
    ],
)
async def test_other_user_is_refused_at_each_door_and_its_own_user_is_served(
    loopback: Lane, door: Callable[[str], str], answer: str, told: str
) -> None:
    listener, inbox = loopback.listen()
    troubles = Troubles()
    listener.on_failure(troubles)
    assert await asyncio.to_thread(as_nobody, lambda: door(listener.address)) == answer
    await loopback.reaches(listener.address, inbox)
    assert {text for text, _ in troubles.told} == ({told} if told else set())


@contextlib.contextmanager
def impostor(address: str, places: tuple[str, ...]) -> Iterator[list[bytes]]:
    """Have another user listen at an address first; what it is sent is kept."""
    heard: list[bytes] = []
    ready = threading.Event()
    done_reader, done = socket.socketpair()
    report_reader, report = socket.socketpair()

    def listen() -> str:
        ends = [socket.create_server(("127.0.0.1", port_of(address)))] if "port" in places else []
        if "socket" in places:
            end = socket.socket(socket.AF_UNIX)
            end.bind(place_of(address))
            end.listen()
            ends.append(end)
        report.send(b"ready")
        done_reader.recv(1)
        said = b""
        for end in ends:
            end.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    connection, _ = end.accept()
                    connection.setblocking(False)
                    with contextlib.suppress(BlockingIOError):
                        said += connection.recv(1000)
        return said.decode("latin1")

    def run() -> None:
        heard.append(as_nobody(listen).encode("latin1"))

    thread = threading.Thread(target=run)
    thread.start()
    report_reader.recv(10)
    ready.set()
    try:
        yield heard
    finally:
        done.send(b"x")
        thread.join()
        for end in (done_reader, done, report_reader, report):
            end.close()


@needs_another_user
async def test_other_user_that_took_the_address_first_gets_no_message(loopback: Lane) -> None:
    address = loopback.unused()
    with impostor(address, ("port", "socket")) as heard:
        text = await asyncio.to_thread(as_a_task, address)
        assert text.startswith("it belongs to user 65534, and this task to user 0; ")
        with pytest.raises(ConfigError, match="Address already in use"):
            loopback.bind(address)
    assert heard == [b""]


@needs_another_user
async def test_other_user_that_comes_after_the_own_listener_is_not_final(loopback: Lane) -> None:
    address = loopback.unused()
    listener, inbox = loopback.listen(address)
    peer, _ = loopback.peer(address)
    troubles = Troubles()
    peer.on_failure(troubles)
    peer.send([b"before"])
    await inbox.first(1)
    listener.close()
    with impostor(address, ("socket",)) as heard:
        text, is_final = await troubles.first()
        peer.send([b"meanwhile"])
    assert (text.partition(",")[0], is_final) == ("it belongs to user 65534", False)
    assert heard == [b""]
    _, again = await loopback.bind_again(address)
    assert await again.first(1) == [[b"meanwhile"]]


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (greeting(NULL), "it runs with --insecure, so this task cannot tell whose it is"),
        (greeting(CURVE), "it takes encrypted connections only; give --keys DIR"),
        (greeting(UNIX), "it takes connections of its own user on its own host only"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "the listener there is not a ps"),
    ],
)
async def test_port_of_another_program_is_reported_and_gets_no_message(
    said: bytes, text: str
) -> None:
    heard = b""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal heard
        writer.write(said)
        with contextlib.suppress(ConnectionError):
            heard += await reader.read(1000)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    _, port = server.sockets[0].getsockname()
    told = await asyncio.to_thread(as_a_task, f"tcp://127.0.0.1:{port}")
    assert told.startswith(text)
    assert b"stop" not in heard
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize(
    ("keyed_peer", "text"),
    [
        (False, "it takes connections of its own user on its own host only; start this task "),
        (True, "it has no keys and takes connections of its own user only; start it with the --ke"),
    ],
)
async def test_peer_with_keys_or_insecure_is_refused_with_the_remedy(
    keyed: Keyed, keyed_peer: bool, text: str
) -> None:
    transport, inbox = TransportByAddress(), Inbox()
    listener = transport.bind("tcp://127.0.0.1:0")
    listener.start(inbox)
    keyed.servers[listener.address] = Owner("ps")
    peer, _, told = keyed.peer(listener.address, Owner("worker", 0), keyed=keyed_peer)
    peer.send([b"hello"])
    assert (await told.last())[0].startswith(text)
    assert inbox.messages == []
    transport.close()


async def test_crowd_at_the_port_is_sent_away_and_keeps_no_descriptor(loopback: Lane) -> None:
    listener, inbox = loopback.listen()
    peer, _ = loopback.peer(listener.address)
    for number in range(300):
        assert await asyncio.to_thread(by_the_port, listener.address) == "True"
        peer.send([b"%d" % number])
    await inbox.first(300)


@pytest.mark.parametrize("address", ["tcp://[::1]:0", "tcp://localhost:0", "tcp://127.9.8.7:0"])
async def test_any_spelling_of_loopback_serves_its_own_user(loopback: Lane, address: str) -> None:
    listener, inbox = loopback.listen(address)
    await loopback.reaches(listener.address, inbox)


async def test_two_listeners_of_any_kind_do_not_share_an_address() -> None:
    by_user, by_port = TransportByAddress(), TransportByAddress(Security(insecure=True))
    for first, second in ((by_user, by_user), (by_user, by_port), (by_port, by_user)):
        listener = first.bind("tcp://127.0.0.1:0")
        with pytest.raises(ConfigError, match="Address already in use"):
            second.bind(listener.address)
    by_user.close()
    by_port.close()


@pytest.mark.usefixtures("tempdir")
def test_place_is_a_name_on_linux_and_a_file_of_this_user_elsewhere() -> None:
    assert place_of("tcp://localhost:22", "linux") == place_of("tcp://127.0.0.1:22", "linux")
    assert place_of("tcp://[::1]:22", "linux") == "\0zmqtrain/::1:22"
    path = Path(place_of("tcp://127.0.0.1:22", "darwin"))
    assert path.name == "127.0.0.1-22.sock"
    assert path.parent.stat().st_mode & 0o777 == 0o700
    path.parent.chmod(0o755)
    with pytest.raises(ConfigError, match="is open to other users"):
        place_of("tcp://127.0.0.1:22", "darwin")
