"""Faults that only Unix sockets can have; the rest is in the contract of all transports."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import stat
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
import uvloop

from tests.transport.conftest import Lane, Troubles
from zmqtrain.errors import ConfigError
from zmqtrain.transport.by_address import TransportByAddress
from zmqtrain.transport.framing import MAX_FRAME_NBYTES, MAX_FRAMES, MessageSplitter, heading
from zmqtrain.wire.buffers import FRAME_NBYTES, Buffer

GARBAGE = {
    "no message": b"GET / HTTP/1.1\r\n\r\n" * 100,
    "no frames": struct.pack("<I", 0),
    "too many frames": struct.pack("<I", MAX_FRAMES + 1),
    "a frame that is too large": struct.pack("<2I", 1, MAX_FRAME_NBYTES + 1),
    "too much in all": struct.pack("<101I", 100, *[MAX_FRAME_NBYTES] * 100),
}


def plain(address: str) -> socket.socket:
    """A connection of somebody who may send anything."""
    end = socket.socket(socket.AF_UNIX)
    end.connect(address.removeprefix("unix://"))
    end.setblocking(False)
    return end


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=list(GARBAGE))
async def test_connection_that_brings_garbage_is_closed_alone(unix: Lane, garbage: bytes) -> None:
    listener, inbox, peer, answers = await unix.pair()
    with plain(listener.address) as bad:
        bad.send(b"".join([heading([b"good"]), b"good", garbage]))
        async with asyncio.timeout(10):
            assert await asyncio.get_running_loop().sock_recv(bad, 1) == b""
    assert await inbox.first(2) == [[b"before"], [b"good"]]
    peer.send([b"after"])
    assert await inbox.first(3) == [[b"before"], [b"good"], [b"after"]]
    listener.send([b"yes"], inbox.peers[0])
    assert await answers.first(1) == [[b"yes"]]


async def test_listener_that_answers_with_garbage_is_connected_to_again(unix: Lane) -> None:
    address = unix.unused()
    with socket.socket(socket.AF_UNIX) as impostor:
        impostor.bind(address.removeprefix("unix://"))
        impostor.listen()
        impostor.setblocking(False)
        peer, answers = unix.peer(address)
        end, _ = await asyncio.get_running_loop().sock_accept(impostor)
        with end:
            end.send(GARBAGE["no message"])
            async with asyncio.timeout(10):
                assert await asyncio.get_running_loop().sock_recv(end, 1) == b""
    listener, inbox = unix.listen(address)
    peer.send([b"hello"])
    await inbox.first(1)
    listener.send([b"yes"], inbox.peers[0])
    assert await answers.first(1) == [[b"yes"]]


async def test_peer_that_dies_within_a_message_leaves_nothing_of_it(unix: Lane) -> None:
    listener, inbox = unix.listen()
    message = [b"header", bytes(FRAME_NBYTES)]
    with plain(listener.address) as dying:
        dying.send(heading(message) + b"".join(message)[:1000])
    await unix.reaches(listener.address, inbox)


async def test_message_sent_in_part_to_a_listener_that_died_is_lost_and_the_next_is_not(
    unix: Lane,
) -> None:
    address = unix.unused()
    with socket.socket(socket.AF_UNIX) as dying:
        dying.bind(address.removeprefix("unix://"))
        dying.listen()
        peer, _ = unix.peer(address)
        for _ in range(4):  # more than the socket takes
            peer.send([b"large", bytes(FRAME_NBYTES)])
        peer.send([b"small"])
    _, inbox = unix.listen(address)
    messages = (await inbox.first(4))[-4:]
    assert [message[0] for message in messages] == [b"large"] * 3 + [b"small"]


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_messages_before_a_reset_are_read_before_the_end(
    unix_directory: Path, new_loop: Any
) -> None:
    """A socket with messages that were not read is reset when its process is killed; uvloop then
    calls its reader once more, and never again."""

    async def main() -> None:
        transport = TransportByAddress()
        address = f"unix://{unix_directory}/s"
        listener: Any = transport.bind(address)
        came: asyncio.Queue[bytes] = asyncio.Queue()
        listener.start(lambda peer, frames: came.put_nowait(bytes(frames[0])))
        end = plain(address)
        end.send(heading([b"hello"]) + b"hello")
        async with asyncio.timeout(10):
            await came.get()
            (connection,) = listener.connections.values()
            connection.send([b"unread"])
            for number in range(20):
                end.send(heading([b"%d" % number]) + b"%d" % number)
            end.close()
            assert [await came.get() for _ in range(20)] == [b"%d" % n for n in range(20)]
            while not connection.is_closed:  # noqa: ASYNC110 (there is no event of it)
                await asyncio.sleep(0.001)
        transport.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_peer_whose_listener_was_killed_reads_on_and_keeps_what_it_sends(
    unix_directory: Path, new_loop: Any
) -> None:
    address, path = f"unix://{unix_directory}/s", f"{unix_directory}/s"

    async def main() -> None:
        transport = TransportByAddress()
        came: asyncio.Queue[bytes] = asyncio.Queue()
        with socket.socket(socket.AF_UNIX) as killed:
            killed.bind(path)
            killed.listen()
            peer = transport.connect(address)
            end, _ = killed.accept()
            peer.start(lambda _, frames: came.put_nowait(bytes(frames[0])))
            peer.send([b"unread"])
            for number in range(20):
                end.send(heading([b"%d" % number]) + b"%d" % number)
            end.close()
        async with asyncio.timeout(10):
            for number in range(20):
                assert await came.get() == b"%d" % number
                peer.send([b"an answer"])
            listener = transport.bind(address)
            served: asyncio.Queue[bytes] = asyncio.Queue()
            listener.start(lambda _, frames: served.put_nowait(bytes(frames[0])))
            assert [await served.get() for _ in range(20)] == [b"an answer"] * 20
        transport.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())


@pytest.fixture
def unix_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("u")


async def test_closing_the_transport_sends_waiting_messages(unix: Lane) -> None:
    address = unix.unused()
    with socket.socket(socket.AF_UNIX) as slow:
        slow.bind(address.removeprefix("unix://"))
        slow.listen()
        transport = TransportByAddress()
        peer = transport.connect(address)
        peer.start(lambda *_: None)
        end, _ = slow.accept()
        message: list[Buffer] = [b"header", bytes(4 * FRAME_NBYTES)]
        peer.send(message)
        received: list[bytes] = []

        def read() -> None:
            with end, end.makefile("rb") as file:
                received.append(file.read())

        reader = threading.Thread(target=read)
        reader.start()
        transport.close()
        reader.join()
        assert received == [heading(message) + b"".join(message)]


async def test_peer_that_never_reads_does_not_keep_the_process(unix: Lane) -> None:
    address = unix.unused()
    with socket.socket(socket.AF_UNIX) as idle:
        idle.bind(address.removeprefix("unix://"))
        idle.listen()
        transport = TransportByAddress(linger_s=0.01)
        peer = transport.connect(address)
        peer.start(lambda *_: None)
        peer.send([b"header", bytes(4 * FRAME_NBYTES)])
        transport.close()


async def test_listener_without_a_descriptor_left_takes_the_next_one_later(unix: Lane) -> None:
    listener, inbox, _, answers = await unix.pair()
    late = plain(listener.address)
    late.send(heading([b"late"]) + b"late")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        listener.send([b"still there"], inbox.peers[0])
        assert await answers.first(1) == [[b"still there"]]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert await inbox.first(2) == [[b"before"], [b"late"]]
    late.close()


async def test_socket_that_a_killed_ps_has_left_is_bound_again(unix: Lane) -> None:
    address = unix.unused()
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(address.removeprefix("unix://"))
    _, inbox = unix.listen(address)
    await unix.reaches(address, inbox)


async def test_socket_belongs_to_its_user_and_is_gone_when_it_is_closed(unix: Lane) -> None:
    listener, _ = unix.listen()
    path = listener.address.removeprefix("unix://")
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    listener.close()
    with pytest.raises(FileNotFoundError):
        os.stat(path)


async def test_closing_leaves_the_socket_of_another_alone(unix: Lane) -> None:
    listener, _ = unix.listen()
    os.unlink(listener.address.removeprefix("unix://"))
    _, inbox = unix.listen(listener.address)
    listener.close()
    await unix.reaches(listener.address, inbox)


@pytest.mark.parametrize(
    ("path", "reason"),
    [("/nonexistent/directory/ps", "No such file"), (f"/tmp/{'x' * 103}", "longer than the 107")],
)
async def test_address_that_cannot_be_bound_is_refused_with_the_reason(
    path: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        TransportByAddress().bind(f"unix://{path}")


async def test_failure_to_connect_is_reported_with_the_reason(unix: Lane) -> None:
    address = unix.unused()
    os.mknod(address.removeprefix("unix://"))
    peer, _ = unix.peer(f"{address}/ps")
    peer.on_failure(told := Troubles())
    text, is_final = await told.first()
    assert "Not a directory" in text
    assert not is_final


def test_stream_cut_anywhere_gives_the_same_messages() -> None:
    messages: list[list[Buffer]] = [[b"a"], [b"", b"bc", b""], [bytes(300)], [b""]]
    stream = b"".join(heading(message) + b"".join(message) for message in messages)
    for size in (1, 2, 3, 5, 7, 64, len(stream)):
        incoming, found, at = MessageSplitter(), [], 0
        while at < len(stream):
            room = incoming.room
            part = stream[at : at + (size if room is None else min(size, len(room)))]
            at += len(part)
            if room is None:
                incoming.add(part)
            else:
                room[: len(part)] = part
                incoming.fill(len(part))
            while (message := incoming.next()) is not None:
                found.append([bytes(frame) for frame in message])
        assert found == messages, size


async def test_many_small_messages_wait_for_a_peer_that_is_busy(unix: Lane) -> None:
    """So a window of compressed chunks, hundreds of them, is sent in one go."""
    listener, inbox = unix.listen()
    peer, _ = unix.peer(listener.address)
    for number in range(2000):
        peer.send([b"%d" % number, bytes(4000)])
    received = await inbox.first(2000)
    assert [message[0] for message in received] == [b"%d" % number for number in range(2000)]
