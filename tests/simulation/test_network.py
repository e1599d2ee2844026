"""The simulated network: a transport like any other, and all that goes wrong in it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from random import Random
from typing import Any

import pytest

from simulation.faults import Weather
from simulation.loop import Process, VirtualLoop
from simulation.network import Connection, Cut, Frames, Network
from zmqtrain.transport.base import UnreachableError

ADDRESS = "ipc://simulated/0"
CALM = Weather(0.01, 0.0)


class World:
    """A listener that answers every message with itself, and one end connected to it."""

    def __init__(self, weather: Weather) -> None:
        self.loop = VirtualLoop(Random(1), starts_at=0.0)
        self.fates: list[str] = []
        self.network = Network(self.loop, Random(2), weather, self._watch)
        self.server, self.client = Process("ps 0"), Process("worker 0")
        self.served: list[bytes] = []
        self.answers: list[tuple[float, bytes]] = []
        self.at_server = self.network.transport(self.server)
        self.at_client = self.network.transport(self.client)

    def _watch(self, connection: Connection, up: bool, frames: Frames, fate: str) -> None:
        self.fates.append(fate)

    def serve(self) -> None:
        self.listener = self.at_server.bind(ADDRESS)

        def answer(peer: bytes, frames: Frames) -> None:
            self.served.append(bytes(frames[0]))
            self.listener.send(frames, peer)

        self.listener.start(answer)

    def connect(self) -> None:
        self.end = self.at_client.connect(ADDRESS)
        self.end.start(lambda _, frames: self.answers.append((self.loop.time(), bytes(frames[0]))))

    def run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        try:
            self.loop.run_until_complete(coroutine)
        finally:
            self.loop.close()


def talk(weather: Weather, messages: int = 20) -> World:
    """Send numbered messages, one every 10 ms, and wait for what comes back."""
    world = World(weather)

    async def main() -> None:
        world.serve()
        world.connect()
        for number in range(messages):
            world.end.send([b"%d" % number])
            await asyncio.sleep(0.01)
        await asyncio.sleep(10)

    world.run(main())
    return world


def numbers(world: World) -> list[int]:
    return [int(answer) for _, answer in world.answers]


def test_some_messages_are_lost_and_the_rest_keep_their_order() -> None:
    found = numbers(talk(Weather(0.01, 0.01, loss=0.3)))
    assert 0 < len(found) < 20
    assert found == sorted(found)


def test_some_messages_come_twice() -> None:
    found = numbers(talk(Weather(0.01, 0.01, repetition=0.5)))
    assert set(found) == set(range(20))
    assert len(found) > 20


def test_messages_overtake_one_another_only_in_such_weather() -> None:
    found = numbers(talk(Weather(0.01, 0.5, overtaking=True)))
    assert sorted(found) == list(range(20)) != found


@pytest.mark.parametrize("keeps", [True, False])
def test_cut_keeps_messages_until_it_ends_or_loses_them(keeps: bool) -> None:
    world = World(CALM)

    async def main() -> None:
        world.serve()
        world.connect()
        world.network.cuts.append(Cut({"ps 0"}, ends_at=5.0, keeps=keeps))
        world.end.send([b"1"])
        await asyncio.sleep(6)
        world.end.send([b"2"])
        await asyncio.sleep(1)

    world.run(main())
    assert world.served == ([b"1", b"2"] if keeps else [b"2"])
    assert all(at > 5.0 for at, _ in world.answers)


def test_broken_connection_loses_what_is_on_its_way_and_is_made_again() -> None:
    world = World(CALM)

    async def main() -> None:
        world.serve()
        world.connect()
        world.end.send([b"1"])
        world.network.break_connections("worker 0")
        await asyncio.sleep(1)
        world.end.send([b"2"])
        await asyncio.sleep(1)

    world.run(main())
    assert world.served == [b"2"]
    assert numbers(world) == [2]
    assert "lost" in world.fates


def test_closed_end_still_delivers_its_messages_and_a_vanished_one_does_not() -> None:
    for leave, served in (("close", [b"1"]), ("vanish", [])):
        world = World(CALM)

        async def main(world: World = world, leave: str = leave) -> None:
            world.serve()
            world.connect()
            world.end.send([b"1"])
            getattr(world.at_client, leave)()
            with pytest.raises(UnreachableError):
                world.end.send([b"2"])
            await asyncio.sleep(1)

        world.run(main())
        assert world.served == served, leave
        assert world.answers == []
