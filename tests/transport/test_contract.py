"""Contract of every transport; a new one joins by one row in the fixture ``lane``."""

from __future__ import annotations

import asyncio
import re
import threading
import weakref
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests.transport.conftest import Lane
from zmqtrain.errors import ConfigError
from zmqtrain.transport.base import COPIED_NBYTES, RoutingId, UnreachableError
from zmqtrain.wire.buffers import FRAME_NBYTES, Buffer


def numbered(count: int) -> list[list[Buffer]]:
    return [[b"%d" % number] for number in range(count)]


async def test_every_one_of_many_peers_keeps_its_order(lane: Lane) -> None:
    listener, inbox = lane.listen()
    peers = [lane.peer(listener.address)[0] for _ in range(20)]
    for number in range(30):
        for name, peer in enumerate(peers):
            await lane.send(peer, [b"%d" % name, b"%d" % number])
    await inbox.first(20 * 30)
    by_peer: dict[RoutingId, list[list[bytes]]] = {}
    for peer, message in zip(inbox.peers, inbox.messages, strict=True):
        by_peer.setdefault(peer, []).append(message)
    sent = [[[b"%d" % name, b"%d" % number] for number in range(30)] for name in range(20)]
    assert sorted(by_peer.values()) == sorted(sent)


async def test_reply_reaches_the_peer_that_asked(lane: Lane) -> None:
    listener = lane.bind()
    listener.start(lambda peer, frames: listener.send([b"to", *frames], peer))
    peers = [lane.peer(listener.address) for _ in range(8)]
    for number in range(5):
        for name, (peer, _) in enumerate(peers):
            await lane.send(peer, [b"%d" % name, b"%d" % number])
    for name, (_, inbox) in enumerate(peers):
        expected = [[b"to", b"%d" % name, b"%d" % number] for number in range(5)]
        assert await inbox.first(5) == expected


async def test_long_exchange_never_stalls(lane: Lane) -> None:
    """Sending and receiving in turn is where an edge-triggered socket loses its wake-up."""
    listener = lane.bind()
    listener.start(lambda peer, frames: listener.send(frames, peer))
    peer = lane.connect(listener.address)
    done = asyncio.get_running_loop().create_future()

    def on_message(_: RoutingId, frames: list[Buffer]) -> None:
        number = int(bytes(frames[0]))
        if number == 500:
            done.set_result(None)
        else:
            peer.send([b"%d" % (number + 1)])

    peer.start(on_message)
    peer.send([b"0"])
    async with asyncio.timeout(10):
        await done


async def test_large_message_of_many_frames_arrives_whole(lane: Lane) -> None:
    listener, inbox = lane.listen()
    peer, answers = lane.peer(listener.address)
    data = np.random.default_rng(0).bytes(FRAME_NBYTES)
    frames = [b"header", data, memoryview(data)[5:], b"", b"x", data]
    peer.send(frames)
    assert await inbox.first(1) == [[bytes(frame) for frame in frames]]
    listener.send(frames, inbox.peers[0])
    assert await answers.first(1) == [[bytes(frame) for frame in frames]]


@pytest.mark.parametrize("is_listened", [True, False])
async def test_small_frames_are_copied_by_send_beside_large_ones(
    lane: Lane, is_listened: bool
) -> None:
    address = lane.unused()
    if is_listened:
        listener, inbox = lane.listen(address)
    peer, _ = lane.peer(address)
    large = bytes(COPIED_NBYTES + 1)
    small = [bytearray(b"header"), bytearray(COPIED_NBYTES), bytearray(b"trailer")]
    peer.send([small[0], small[1], large, small[2]])
    peer.send([small[1]])
    for frame in small:
        frame[:] = b"\xff" * len(frame)
    if not is_listened:
        listener, inbox = lane.listen(address)
    assert await inbox.first(2) == [
        [b"header", bytes(COPIED_NBYTES), large, b"trailer"],
        [bytes(COPIED_NBYTES)],
    ]
    assert listener.address == address


async def test_large_frame_may_be_written_again_once_it_was_delivered(lane: Lane) -> None:
    kept: list[list[Buffer]] = []
    arrived = asyncio.Event()

    def on_message(_: RoutingId, frames: list[Buffer]) -> None:
        kept.append(frames)
        arrived.set()

    listener = lane.bind()
    listener.start(on_message)
    peer, _ = lane.peer(listener.address)
    values = np.zeros(FRAME_NBYTES, np.uint8)
    for number in range(5):
        values[:] = number
        peer.send([b"header", values.data])
        async with asyncio.timeout(10):
            await arrived.wait()
        arrived.clear()
    values[:] = 255
    assert [bytes(frames[1]) for frames in kept] == [bytes([n]) * FRAME_NBYTES for n in range(5)]


async def test_large_frame_is_held_until_it_has_left_and_no_longer(lane: Lane) -> None:
    address = lane.unused()
    peer, _ = lane.peer(address)
    values = np.full(FRAME_NBYTES, 7, np.uint8)
    given_back = asyncio.Event()
    weakref.finalize(values, asyncio.get_running_loop().call_soon_threadsafe, given_back.set)
    peer.send([b"header", values.data])
    del values
    other = np.full(FRAME_NBYTES, 8, np.uint8)  # where it lay, had it been given back
    _, inbox = lane.listen(address)
    assert await inbox.first(1) == [[b"header", b"\7" * FRAME_NBYTES]]
    assert other.all()
    async with asyncio.timeout(10):
        await given_back.wait()


async def test_messages_sent_without_a_listener_are_kept_up_to_a_limit(lane: Lane) -> None:
    address = lane.unused()
    peer, _ = lane.peer(address)
    kept = 0
    with pytest.raises(UnreachableError):
        for message in numbered(1000):
            peer.send(message)
            kept += 1
    assert kept > 0
    _, inbox = lane.listen(address)
    assert await inbox.first(kept) == numbered(kept)


async def test_listener_sends_messages_up_to_its_high_water_mark(lane: Lane) -> None:
    listener = lane.bind(high_water_mark=500)
    inbox = lane.start(listener)
    peer = lane.connect(listener.address)
    peer.send([b"hello"])
    await inbox.first(1)
    large = bytes(COPIED_NBYTES + 1)
    for number in range(500):
        listener.send([b"%d" % number, large], inbox.peers[0])
    received = await lane.start(peer).first(500)
    assert [message[0] for message in received] == [b"%d" % number for number in range(500)]


async def test_messages_that_came_before_start_are_delivered_by_it(lane: Lane) -> None:
    listener = lane.bind()
    peer = lane.connect(listener.address)
    peer.send([b"early"])
    inbox = lane.start(listener)
    assert await inbox.first(1) == [[b"early"]]
    listener.send([b"early too"], inbox.peers[0])
    assert await lane.start(peer).first(1) == [[b"early too"]]


async def test_reply_to_a_peer_that_closed_is_unreachable(lane: Lane) -> None:
    listener, inbox, peer, _ = await lane.pair()
    peer.close()
    await lane.send_until_unreachable(listener, inbox.peers[0])


@pytest.mark.parametrize("name", [b"", b"nobody", b"\x00abcd"])
async def test_message_to_an_unknown_peer_is_unreachable(lane: Lane, name: RoutingId) -> None:
    listener, _ = lane.listen()
    with pytest.raises(UnreachableError):
        listener.send([b"hello"], name)


async def test_closed_end_sends_nothing(lane: Lane) -> None:
    listener, inbox = lane.listen()
    peer, _ = lane.peer(listener.address)
    other, _ = lane.peer(listener.address)
    peer.send([b"first"])
    await inbox.first(1)
    peer.close()
    with pytest.raises(UnreachableError):
        peer.send([b"second"])
    other.send([b"third"])
    assert await inbox.first(2) == [[b"first"], [b"third"]]
    listener.close()
    with pytest.raises(UnreachableError):
        listener.send([b"fourth"], inbox.peers[0])


async def test_message_sent_just_before_close_arrives(lane: Lane) -> None:
    listener, inbox = lane.listen()
    peer, _ = lane.peer(listener.address)
    peer.send([b"farewell"])
    peer.close()
    assert await inbox.first(1) == [[b"farewell"]]


async def test_listener_tells_the_address_at_which_it_is_reached(lane: Lane) -> None:
    listener, inbox = lane.listen(lane.free())
    other, _ = lane.listen(lane.free())
    assert listener.address != other.address
    if lane.kind not in ("unix", "simulated"):
        assert re.fullmatch(r"tcp://127\.0\.0\.1:[1-9]\d+", listener.address)
    peer, _ = lane.peer(listener.address)
    assert peer.address == listener.address
    peer.send([b"hello"])
    assert await inbox.first(1) == [[b"hello"]]


async def test_taken_address_is_refused_by_its_name(lane: Lane) -> None:
    listener, inbox = lane.listen()
    with pytest.raises(ConfigError, match=re.escape(listener.address)):
        lane.bind(listener.address)
    await lane.reaches(listener.address, inbox)


async def test_closed_listener_frees_its_address_and_gets_nothing_more(lane: Lane) -> None:
    listener, before, first, _ = await lane.pair()
    first.close()
    listener.close()
    _, after = await lane.bind_again(listener.address)
    await lane.reaches(listener.address, after)
    assert before.messages == [[b"before"]]


async def test_peer_reaches_the_next_listener_at_its_address(lane: Lane) -> None:
    listener, before, peer, answers = await lane.pair()
    listener.close()
    peer.send([b"kept or lost, but no error"])
    again, after = await lane.bind_again(listener.address)
    async with asyncio.timeout(10):
        while not after.messages:
            peer.send([b"is anyone there?"])
            await asyncio.sleep(0.02)
    again.send([b"yes"], after.peers[0])
    assert await answers.first(1) == [[b"yes"]]
    assert before.messages == [[b"before"]]


async def test_messages_are_handed_over_by_the_loop(lane: Lane) -> None:
    """Neither in another thread nor inside a send: handlers need no lock."""
    loop, thread = asyncio.get_running_loop(), threading.get_ident()
    listener = lane.bind()
    peer = lane.connect(listener.address)
    depth = 0
    done = asyncio.Event()

    def handle(endpoint: Any, name: RoutingId, count: int) -> None:
        nonlocal depth
        assert asyncio.get_running_loop() is loop and threading.get_ident() == thread
        assert depth == 0, "called from within a send"
        depth += 1
        if count < 50:
            endpoint.send([b"%d" % (count + 1)], name)
        else:
            done.set()
        depth -= 1

    listener.start(lambda name, frames: handle(listener, name, int(bytes(frames[0]))))
    peer.start(lambda name, frames: handle(peer, name, int(bytes(frames[0]))))
    depth += 1
    peer.send([b"0"])
    depth -= 1
    async with asyncio.timeout(10):
        await done.wait()


async def test_endpoint_closed_by_its_own_handler_gets_nothing_more(lane: Lane) -> None:
    listener = lane.bind()
    seen = []
    closed = asyncio.Event()

    def on_message(_: RoutingId, frames: list[Buffer]) -> None:
        seen.append(bytes(frames[0]))
        listener.close()
        closed.set()

    peer, _ = lane.peer(listener.address)
    for message in numbered(20):
        peer.send(message)
    listener.start(on_message)
    async with asyncio.timeout(10):
        await closed.wait()
    _, after = await lane.bind_again(listener.address)
    other, _ = lane.peer(listener.address)
    other.send([b"barrier"])
    async with asyncio.timeout(10):
        while [b"barrier"] not in after.messages:
            await after.first(len(after.messages) + 1)
    assert seen == [b"0"]


async def test_burst_leaves_turns_to_the_loops_other_work(lane: Lane) -> None:
    if lane.kind == "simulated":
        pytest.skip("there each message is a callback of its own")
    listener = lane.bind()
    peers = [lane.peer(listener.address)[0] for _ in range(50)]
    for peer in peers:
        for message in numbered(60):
            await lane.send(peer, message)
    handled = 0

    def on_message(_: RoutingId, frames: list[Buffer]) -> None:
        nonlocal handled
        handled += 1

    listener.start(on_message)
    handled_at_turn = [0]
    async with asyncio.timeout(10):
        while handled < 50 * 60:
            await asyncio.sleep(0)
            handled_at_turn.append(handled)
    assert max(after - before for before, after in pairwise(handled_at_turn)) <= 100


async def test_closing_twice_is_closing(lane: Lane) -> None:
    listener, _ = lane.listen()
    peer, _ = lane.peer(listener.address)
    for endpoint in (listener, peer):
        endpoint.close()
        endpoint.close()
    lane.transport.close()


async def test_closed_transport_has_closed_its_endpoints(lane: Lane) -> None:
    listener, inbox, peer, _ = await lane.pair()
    lane.transport.close()
    for endpoint, name in ((listener, inbox.peers[0]), (peer, b"")):
        with pytest.raises(UnreachableError):
            endpoint.send([b"after"], name)
