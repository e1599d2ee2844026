"""The shortcut between two processes of a host, and what ends it."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import secrets
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import psutil
import pytest
import uvloop

from zmqtrain.transport.base import RoutingId, UnreachableError
from zmqtrain.transport.shortcut import MAX_NBYTES, ShortcutEndpoint, ShortcutListener, fits
from zmqtrain.wire.buffers import Buffer

Inbox = Any  # of conftest.py, as Troubles
Troubles = Any

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="abstract names are Linux's")


@pytest.fixture
def name() -> str:
    return secrets.token_hex(8)


@pytest.fixture(scope="module", autouse=True)
def loop_before() -> None:
    """The first loop of uvloop opens files that stay open."""
    uvloop.run(asyncio.sleep(0))


@pytest.fixture(autouse=True)
async def nothing_stays() -> AsyncIterator[None]:
    """No callback raises, and no socket is left open."""
    stray: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: stray.append(context))
    fds = psutil.Process().num_fds()
    yield
    gc.collect()
    assert stray == []
    assert psutil.Process().num_fds() <= fds


@pytest.fixture
def listen(inbox: Callable[[], Inbox]) -> Callable[[str], tuple[ShortcutListener, Inbox]]:
    def start(name: str) -> tuple[ShortcutListener, Inbox]:
        listener, received = ShortcutListener(name), inbox()
        listener.start(received)
        return listener, received

    return start


@pytest.fixture
def connect(inbox: Callable[[], Inbox]) -> Callable[[str], tuple[ShortcutEndpoint, Inbox]]:
    def start(name: str) -> tuple[ShortcutEndpoint, Inbox]:
        end, received = ShortcutEndpoint(name), inbox()
        end.start(received)
        return end, received

    return start


def numbered(count: int) -> list[list[Buffer]]:
    return [[b"%d" % number] for number in range(count)]


async def test_messages_arrive_whole_and_in_order_at_whom_they_are_for(
    name: str, listen: Any, connect: Any
) -> None:
    listener, received = listen(name)
    ends = [connect(name) for _ in range(4)]
    largest = bytes(MAX_NBYTES)
    for number, (end, _) in enumerate(ends):
        for message in numbered(30):
            end.send([b"%d:%s" % (number, message[0])])
        end.send([largest])
    await received.first(4 * 31)
    by_peer: dict[RoutingId, list[bytes]] = {}
    for peer, (frame,) in zip(received.peers, received.messages, strict=True):
        by_peer.setdefault(peer, []).append(frame)
        listener.send([frame], peer)
    sent = [[*(b"%d:%d" % (i, n) for n in range(30)), largest] for i in range(4)]
    assert sorted(by_peer.values()) == sent
    for (end, answers), expected in zip(ends, sent, strict=True):
        assert [frame for (frame,) in await answers.first(31)] == expected
        assert set(answers.peers) == {b""}
        end.close()
    listener.close()


async def test_what_was_sent_before_an_end_closed_arrives_and_then_the_end_is_told(
    name: str, listen: Any, connect: Any, troubles: Any
) -> None:
    listener, received = listen(name)
    end, answers = connect(name)
    end.tell(told := troubles())
    end.send([b"hello"])
    await received.first(1)
    for message in numbered(10):
        listener.send(message, received.peers[0])
    listener.close()
    assert await answers.first(10) == numbered(10)
    text, is_final = await told.first()
    assert text.endswith("has ended")
    assert is_final
    with pytest.raises(UnreachableError):
        end.send([b"anyone?"])
    with pytest.raises(UnreachableError):
        ShortcutEndpoint(name)
    end.close()


async def test_worker_that_went_is_unreachable_and_others_are_not(
    name: str, listen: Any, connect: Any
) -> None:
    listener, received = listen(name)
    (first, _), (second, answers) = connect(name), connect(name)
    first.send([b"farewell"])
    first.close()
    await received.first(1)
    second.send([b"hello"])
    await received.first(2)
    with pytest.raises(UnreachableError):
        listener.send([b"too late"], received.peers[0])
    with pytest.raises(UnreachableError):
        listener.send([b"who?"], b"nobody")
    listener.send([b"yes"], received.peers[1])
    assert await answers.first(1) == [[b"yes"]]
    for endpoint in (first, second, listener):
        endpoint.close()
        endpoint.close()


async def test_answer_that_does_not_fit_ends_the_shortcut_of_who_waits_for_it(
    name: str, listen: Any, connect: Any, troubles: Any
) -> None:
    """So it asks again by another way: to drop the answer would have it wait."""
    listener, received = listen(name)
    end, answers = connect(name)
    end.tell(told := troubles())
    for frames in ([bytes(MAX_NBYTES + 1)], [b"two", b"frames"]):
        assert not fits(frames)
    end.send([b"hello"])
    await received.first(1)
    with pytest.raises(UnreachableError, match="messages up to"):
        listener.send([bytes(MAX_NBYTES + 1)], received.peers[0])
    await told.first()
    assert answers.messages == []
    end.close()
    listener.close()


@pytest.fixture
def talking(listen: Any, connect: Any, troubles: Any) -> Any:
    """Both ends, with three answers on their way to the one that connected."""

    async def start(name: str) -> tuple[ShortcutListener, ShortcutEndpoint, Inbox, Troubles]:
        listener, received = listen(name)
        end, answers = connect(name)
        end.tell(told := troubles())
        end.send([b"hello"])
        await received.first(1)
        for message in numbered(3):
            listener.send(message, received.peers[0])
        return listener, end, answers, told

    return start


LOOPS = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])


@LOOPS
def test_end_that_broke_off_loses_nothing_that_it_had_sent(
    name: str, talking: Any, new_loop: Any
) -> None:
    """It broke off, as the kernel sees it, by closing with something unread."""

    async def main() -> None:
        listener, end, answers, told = await talking(name)
        end.send([b"unread"])
        listener.close()
        assert await answers.first(3) == numbered(3)
        await told.first()
        end.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())


@LOOPS
def test_end_that_a_send_met_is_told(name: str, talking: Any, new_loop: Any) -> None:
    """The loop may not tell of it any more."""

    async def main() -> None:
        listener, end, _, told = await talking(name)
        listener.close()
        with pytest.raises(UnreachableError):
            end.send([b"anyone?"])
        assert [is_final for _, is_final in told.told] == [True]
        end.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())


async def test_end_that_reads_nothing_is_full_at_last(name: str, listen: Any) -> None:
    listener, received = listen(name)
    end = ShortcutEndpoint(name)
    end.send([b"hello"])
    await received.first(1)
    with pytest.raises(UnreachableError):
        for _ in range(100_000):
            listener.send([bytes(1000)], received.peers[0])
    end.close()
    listener.close()


async def test_name_belongs_to_one_listener_until_it_closes(
    name: str, listen: Any, connect: Any
) -> None:
    with pytest.raises(UnreachableError, match="refused"):
        ShortcutEndpoint(name)
    listener, _ = listen(name)
    with pytest.raises(UnreachableError, match="in use"):
        ShortcutListener(name)
    listener.close()
    again, received = listen(name)
    end, _ = connect(name)
    end.send([b"hello"])
    assert await received.first(1) == [[b"hello"]]
    end.close()
    again.close()


async def test_other_users_have_no_way_in_and_are_not_trusted(
    name: str, listen: Any, connect: Any, troubles: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener, received = listen(name)
    end, _ = connect(name)  # accepted on the loop's next turn, by who is another user then
    end.tell(told := troubles())
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(UnreachableError, match="another user's"):
        ShortcutEndpoint(name)
    await told.first()
    assert received.messages == []
    end.close()
    listener.close()


async def test_ps_without_a_file_descriptor_left_ends_its_shortcuts(
    name: str, listen: Any, connect: Any, troubles: Any
) -> None:
    """A worker must not push into a connection that nobody accepts."""
    listener, _ = listen(name)
    end, _ = connect(name)
    end.tell(told := troubles())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        for make in (ShortcutListener, ShortcutEndpoint):
            with pytest.raises(UnreachableError, match="Too many open files"):
                make(f"another {name}")
        await told.first()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with pytest.raises(UnreachableError, match="refused"):
        ShortcutEndpoint(name)
    end.close()
    listener.close()


async def test_system_without_abstract_names_has_no_shortcuts(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    for make in (ShortcutListener, ShortcutEndpoint):
        with pytest.raises(UnreachableError, match="this system"):
            make(name)
