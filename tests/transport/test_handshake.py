"""Events of handshakes: which of them make an end look for the reason, and what it finds."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.clock import Clock, StopClock
from zmqtrain.transport import handshake
from zmqtrain.transport.base import OnMessage
from zmqtrain.transport.handshake import CURVE, NULL, PeerWatch, mechanism_at
from zmqtrain.transport.keys import Owner
from zmqtrain.transport.security import Security

OK = (zmq.EVENT_HANDSHAKE_SUCCEEDED, 0)
BROKEN = (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, 32)
WRONG = (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, 0x11000002)
ENDED = (zmq.EVENT_DISCONNECTED, 7)
LATER = (zmq.EVENT_HANDSHAKE_FAILED_AUTH, 300)
BREAK_OFF = [BROKEN, ENDED]


class Events:
    """A monitor's endpoint."""

    def start(self, on_message: OnMessage) -> None:
        self.deliver = on_message

    def close(self) -> None:
        pass


class Watched:
    """A watch, its reports, and the number of its inquiries at the other end."""

    def __init__(self, mechanism: str, theirs: str | None, clock: Clock, patience_s: float) -> None:
        self.events = Events()
        self.told: list[tuple[str, bool]] = []
        self.asked = 0
        self.clock = clock
        self._theirs = theirs
        keys = Path("none") if mechanism == CURVE else None
        security = Security(Owner("worker", 3), keys, patience_s=patience_s)
        self.watch = PeerWatch(
            self.events, "tcp://ps:1", security, "", lambda: None, ask=self._mechanism_at
        )
        self.watch.start()
        self.watch.on_failure(lambda text, is_final: self.told.append((text, is_final)))

    async def _mechanism_at(self, endpoint: str, own: str) -> str | None:
        self.asked += 1
        return self._theirs

    async def see(self, events: list[tuple[int, int]], every_s: float = 0.1) -> None:
        for event in events:
            self.clock.now += every_s
            self.events.deliver(b"", [struct.pack("=HI", *map(int, event)), b"tcp://ps:1"])
            for _ in range(3):  # an inquiry, its answer, and its callback
                await asyncio.sleep(0)


@pytest.fixture
def watched(stop_clock: StopClock) -> Callable[..., Watched]:
    clock = stop_clock(handshake)
    return lambda mechanism=CURVE, theirs=CURVE, patience_s=0.0: Watched(
        mechanism, theirs, clock, patience_s
    )


@pytest.mark.parametrize(
    ("events", "asked"),
    [
        ([OK], 0),
        ([OK, ENDED], 0),
        ([OK, ENDED] * 9, 0),
        (BREAK_OFF * 2, 0),
        (BREAK_OFF * 3, 1),
        (BREAK_OFF * 2 + [OK, ENDED] + BREAK_OFF * 2, 0),
        ([LATER, ENDED] * 9, 0),
        ([WRONG, ENDED], 1),
        ([ENDED], 1),
        ([OK, ENDED, ENDED], 1),
    ],
)
async def test_reason_is_looked_for_when_handshakes_break_off_or_libzmq_gives_up(
    watched: Callable[..., Watched], events: list[tuple[int, int]], asked: int
) -> None:
    seen = watched()
    await seen.see(events)
    assert seen.asked == asked


async def test_end_that_only_takes_its_time_is_waited_for(watched: Callable[..., Watched]) -> None:
    seen = watched()
    await seen.see(BREAK_OFF * 9, every_s=2.0)
    assert (seen.asked, seen.told) == (0, [])


@pytest.mark.parametrize("theirs", [NULL, None])
async def test_end_that_speaks_as_we_do_may_take_us_later(
    watched: Callable[..., Watched], theirs: str | None
) -> None:
    seen = watched(NULL, theirs)
    await seen.see(BREAK_OFF * 3)
    assert [is_final for _, is_final in seen.told] == [False]


@pytest.mark.parametrize(
    ("before", "later_s", "final"),
    [([], 0.0, False), ([], 61.0, True), ([OK, ENDED], 0.0, True)],
    ids=["at first", "for longer than a predecessor lives", "after the right one"],
)
async def test_other_key_may_be_that_of_a_predecessor_for_a_while(
    watched: Callable[..., Watched], before: list[tuple[int, int]], later_s: float, final: bool
) -> None:
    seen = watched(patience_s=60.0)
    await seen.see([*before, *BREAK_OFF * 3])
    seen.clock.now += later_s
    await seen.see(BREAK_OFF * 3)
    assert [is_final for _, is_final in seen.told] == [bool(before), final]


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)


@pytest.mark.parametrize(
    ("answer", "mechanism"),
    [
        (GREETING, "CURVE"),
        (GREETING.replace(b"CURVE", b"NULL\0"), "NULL"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", ""),
        (GREETING[:20], None),
        (b"", None),
    ],
)
async def test_mechanism_is_read_from_a_greeting(answer: bytes, mechanism: str | None) -> None:
    async def greet(reader: Any, writer: asyncio.StreamWriter) -> None:
        said.append(await reader.readexactly(12))
        writer.write(answer)
        if len(answer) == len(GREETING) and b"NULL" in answer:
            said.append(await reader.readexactly(len(GREETING) - 12))
        writer.close()

    said: list[bytes] = []
    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    assert await mechanism_at(f"tcp://{host}:{port}", CURVE) == mechanism
    assert b"".join(said) == (GREETING if mechanism == NULL else GREETING[:12])
    server.close()
    await server.wait_closed()
    assert await mechanism_at(f"tcp://{host}:{port}", CURVE) is None
