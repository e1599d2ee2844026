"""Rules decide about single messages."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from simulation.faults import Weather
from simulation.loop import Process, VirtualLoop
from simulation.network import Network
from simulation.rules import Rule, delay, drop, duplicate
from zmqtrain.wire.codec import Envelope, Sender, decode, encode
from zmqtrain.wire.messages import Leave, Read

ADDRESS = "ipc://simulated/0"


def arrivals(*rules: Rule) -> list[tuple[int, float]]:
    """Have worker 0 send five numbered messages, ten seconds apart, to ps 0.

    Return each number that arrives and the seconds that it took.
    """
    loop, arrived = VirtualLoop(Random(1), starts_at=0.0), []
    network = Network(loop, Random(2), Weather(0.0, 0.0), lambda *_: None, rules)

    async def main() -> None:
        listener = network.transport(Process("ps 0")).bind(ADDRESS)
        listener.start(
            lambda peer, frames: arrived.append((decode(frames).request_id, loop.time() % 10))
        )
        end = network.transport(Process("worker 0")).connect(ADDRESS)
        for number in range(1, 6):
            message = Read() if number % 2 else Leave("")
            end.send(encode(Envelope(message, Sender("worker", 0), number)))
            await asyncio.sleep(10)

    try:
        loop.run_until_complete(main())
    finally:
        loop.close()
    return arrived


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (drop(Read, 2), [1, 2, 4, 5]),
        (drop(Read), [2, 4]),
        (drop(Leave, 1, 2), [1, 3, 5]),
        (drop(Leave, 1, 2, until_s=20.0), [1, 3, 4, 5]),
        (drop(Read, where=lambda message: False), [1, 2, 3, 4, 5]),
        (drop(Read, sender="worker 0", receiver="ps"), [2, 4]),
        (drop(Read, sender="worker 1"), [1, 2, 3, 4, 5]),
        (drop(Read, receiver="worker 0"), [1, 2, 3, 4, 5]),
        (duplicate(Read, 3), [1, 2, 3, 4, 5, 5]),
    ],
)
def test_rule_decides_by_type_number_and_way(rule: Rule, expected: list[int]) -> None:
    assert [number for number, _ in arrivals(rule)] == expected


def test_message_that_is_delayed_arrives_so_much_later() -> None:
    assert arrivals(delay(Leave, 2, by_s=3.0)) == [(1, 0), (2, 0), (3, 0), (4, 3), (5, 0)]
