"""A link with a shortcut: what goes by it, and what happens when it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.actors.conftest import FakePs
from zmqtrain.transport.base import Endpoint, OnTrouble, RoutingId, UnreachableError
from zmqtrain.transport.memory import MemoryEndpoint, MemoryTransport
from zmqtrain.transport.shortcut import MAX_NBYTES
from zmqtrain.wire.buffers import Buffer
from zmqtrain.wire.messages import Alive, Done, Heartbeat, Leave, Push, Release

Worker = Any  # of conftest.py, as Within
Within = Callable[[Any], Any]

BY_SHORTCUT = "tcp://ps-0:1"
PUSH = Push(1, 0, 7, 32, 0.5)
RELEASE = Release(1, "applied", 1)


class Shortcut:
    """One end; ``end`` is what happens when the other end goes."""

    def __init__(self, endpoint: MemoryEndpoint) -> None:
        self._endpoint = endpoint
        self.address, self.start = endpoint.address, endpoint.start
        self.is_open, self.is_full = True, False
        self._on_trouble: OnTrouble

    def tell(self, on_trouble: OnTrouble) -> None:
        self._on_trouble = on_trouble

    def send(self, frames: Sequence[Buffer], peer: RoutingId = b"") -> None:
        if self.is_full:
            raise UnreachableError("too much is unread")
        self._endpoint.send(frames, peer)

    def close(self, *, discard: bool = False) -> None:
        self.is_open = False
        self._endpoint.close()

    def end(self) -> None:
        self._on_trouble("it has ended", True)


class Shortcuts:
    """The ps's side of them: what came by one, and those that were made."""

    def __init__(self, transport: MemoryTransport) -> None:
        self._transport = transport
        self.ps = FakePs(transport, BY_SHORTCUT)
        self.made: list[Shortcut] = []
        self.refusals = 0  # yet to come

    def make(self) -> Endpoint:
        if self.refusals:
            self.refusals -= 1
            raise UnreachableError("nobody listens")
        self.made.append(Shortcut(self._transport.connect(BY_SHORTCUT)))
        return self.made[-1]


@pytest.fixture
async def shortcuts(transport: MemoryTransport) -> Shortcuts:
    return Shortcuts(transport)


async def test_pushes_and_heartbeats_go_by_the_shortcut_and_the_rest_does_not(
    worker: Worker, ps: FakePs, shortcuts: Shortcuts, within: Within
) -> None:
    worker.ps.shortcut.open(shortcuts.make)
    asked = worker.ask(PUSH, sequence=1)
    (request,) = await shortcuts.ps.first(Push)
    shortcuts.ps.reply(request, RELEASE)
    assert (await within(asked)).message == RELEASE
    asked = worker.ask(Leave("done"))
    ps.reply((await ps.first(Leave))[0], Done())
    assert (await within(asked)).message == Done()
    before = len(ps.of(Heartbeat))
    await shortcuts.ps.next(Heartbeat, 3)
    assert len(ps.of(Heartbeat)) == before
    assert (ps.of(Push), shortcuts.ps.of(Leave)) == ([], [])


async def test_message_that_does_not_fit_goes_by_the_usual_way(
    worker: Worker, ps: FakePs, shortcuts: Shortcuts, within: Within
) -> None:
    worker.ps.shortcut.open(shortcuts.make)
    asked = worker.ask(Leave("x" * MAX_NBYTES), sequence=1)
    ps.reply((await ps.first(Leave))[0], RELEASE)
    assert (await within(asked)).message == RELEASE


async def test_push_that_was_lost_with_the_shortcut_is_sent_again_without_it(
    worker: Worker, ps: FakePs, shortcuts: Shortcuts, within: Within
) -> None:
    worker.ps.shortcut.open(shortcuts.make)
    ps.alive = shortcuts.ps.alive = Alive(received=0, answered=0)
    shortcuts.ps.ignores = lambda envelope: True
    asked = worker.ask(PUSH, sequence=1)
    shortcuts.made[0].end()
    assert not shortcuts.made[0].is_open
    (request,) = await ps.first(Push)
    assert len(shortcuts.made) == 1, "a push under way is not to be overtaken"
    ps.reply(request, RELEASE)
    assert (await within(asked)).message == RELEASE


async def test_shortcut_that_cannot_be_sent_by_is_left_and_the_push_goes_on_at_once(
    worker: Worker, ps: FakePs, shortcuts: Shortcuts, within: Within
) -> None:
    worker.ps.shortcut.open(shortcuts.make)
    shortcuts.made[0].is_full = True
    ps.alive = None
    asked = worker.ask(PUSH, sequence=1)
    ps.reply((await ps.first(Push))[0], RELEASE)
    assert (await within(asked)).message == RELEASE
    assert worker.count("rpc_retries") == 0
    assert not shortcuts.made[0].is_open


async def test_another_shortcut_is_looked_for_before_a_push_once_in_a_heartbeat(
    worker: Worker, ps: FakePs, shortcuts: Shortcuts, within: Within
) -> None:
    async def pushed(sequence: int, at: FakePs) -> None:
        asked = worker.ask(Push(sequence, 0, 7, 32, 0.5), sequence=sequence)
        at.reply((await at.next(Push))[0], Release(sequence, "applied", 1))
        await within(asked)

    shortcuts.refusals = 1
    worker.ps.shortcut.open(shortcuts.make)
    assert shortcuts.made == []
    await ps.next(Heartbeat)
    await pushed(1, shortcuts.ps)
    shortcuts.made[0].end()
    shortcuts.refusals = 2
    await ps.next(Heartbeat)
    worker.ps.joined = False  # no more heartbeats
    await pushed(2, ps)
    await pushed(3, ps)
    assert (shortcuts.refusals, len(shortcuts.made)) == (1, 1)
    shortcuts.refusals, worker.ps.joined = 0, True
    await ps.next(Heartbeat)
    await pushed(4, shortcuts.ps)
    assert len(shortcuts.made) == 2


@pytest.mark.parametrize("leave", ["shortcut", "link"])
async def test_shortcut_that_is_left_is_closed_and_not_made_again(
    worker: Worker, ps: FakePs, shortcuts: Shortcuts, leave: str
) -> None:
    worker.ps.shortcut.open(shortcuts.make)
    await shortcuts.ps.first(Heartbeat)
    if leave == "shortcut":
        worker.ps.shortcut.close()
        await ps.next(Heartbeat, 3)
    else:
        worker.ps.close()
    assert [shortcut.is_open for shortcut in shortcuts.made] == [False]
