"""Transports to test, and the proof after every test that they gave everything back."""

from __future__ import annotations

import asyncio
import gc
import itertools
import tempfile
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest

from simulation.faults import Weather
from simulation.loop import Process
from simulation.network import Network
from tests.harness import free_ports
from zmqtrain.errors import ConfigError
from zmqtrain.transport.base import (
    COPIED_NBYTES,
    HIGH_WATER_MARK,
    Endpoint,
    RoutingId,
    Transport,
    UnreachableError,
)
from zmqtrain.transport.by_address import TransportByAddress
from zmqtrain.transport.curve import make_pair
from zmqtrain.transport.keys import Owner, Pair, add_keys, read_registry
from zmqtrain.transport.memory import MemoryTransport
from zmqtrain.transport.router_dealer import ZmqTransport
from zmqtrain.transport.security import Security
from zmqtrain.wire.buffers import Buffer

LIMIT_S = 10


def held() -> tuple[int, int]:
    """Return the numbers of descriptors, and of threads that Python does not know.

    The event loop keeps threads of its own for name lookups.
    """
    process = psutil.Process()
    return process.num_fds(), process.num_threads() - threading.active_count()


async def given_back(before: tuple[int, int]) -> None:
    """Wait until this process holds no more than before: some connections end later."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            if all(now <= then for now, then in zip(held(), before, strict=True)):
                break
            await asyncio.sleep(0.001)


@asynccontextmanager
async def nothing_left() -> AsyncIterator[None]:
    """Check that the block leaves no descriptor or thread, and that no callback raised."""
    stray: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: stray.append(context))
    before = held()
    yield
    await given_back(before)
    assert stray == []


class Inbox:
    """Takes an endpoint's messages, as bytes, and lets a test wait for them."""

    def __init__(self) -> None:
        self.peers: list[RoutingId] = []
        self.messages: list[list[bytes]] = []
        self._arrived = asyncio.Event()

    def __call__(self, peer: RoutingId, frames: list[Buffer]) -> None:
        self.peers.append(peer)
        self.messages.append([bytes(frame) for frame in frames])
        self._arrived.set()

    async def first(self, count: int) -> list[list[bytes]]:
        """Wait for this number of messages, and return the first ones."""
        async with asyncio.timeout(LIMIT_S):
            while len(self.messages) < count:
                self._arrived.clear()
                await self._arrived.wait()
        return self.messages[:count]


@dataclass
class Lane:
    """One kind of transport, with addresses for it."""

    kind: str
    transport: Transport
    unused_addresses: Iterator[str]
    made: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)

    def unused(self) -> str:
        """An address at which nobody listens."""
        return next(self.unused_addresses)

    def free(self) -> str:
        """An address that anyone can bind."""
        return self.unused() if self.kind in ("unix", "simulated") else "tcp://127.0.0.1:0"

    def bind(self, address: str | None = None, high_water_mark: int = HIGH_WATER_MARK) -> Endpoint:
        address = self.free() if address is None else address
        endpoint = self.transport.bind(address, high_water_mark)
        self.made.add(endpoint)
        return endpoint

    def connect(self, address: str) -> Endpoint:
        endpoint = self.transport.connect(address)
        self.made.add(endpoint)
        return endpoint

    def start(self, endpoint: Endpoint) -> Inbox:
        inbox = Inbox()
        endpoint.start(inbox)
        return inbox

    def listen(self, address: str | None = None) -> tuple[Endpoint, Inbox]:
        endpoint = self.bind(address)
        return endpoint, self.start(endpoint)

    def peer(self, address: str) -> tuple[Endpoint, Inbox]:
        endpoint = self.connect(address)
        return endpoint, self.start(endpoint)

    async def pair(self) -> tuple[Endpoint, Inbox, Endpoint, Inbox]:
        """Return a listener, and a peer whose first message has come."""
        listener, inbox = self.listen()
        peer, answers = self.peer(listener.address)
        peer.send([b"before"])
        await inbox.first(1)
        return listener, inbox, peer, answers

    async def reaches(self, address: str, inbox: Inbox) -> None:
        """Check that a new peer's message to an address is the first in this inbox."""
        peer, _ = self.peer(address)
        peer.send([b"a newcomer"])
        assert await inbox.first(1) == [[b"a newcomer"]]

    async def send(self, endpoint: Endpoint, frames: list[Buffer], peer: RoutingId = b"") -> None:
        """Send as soon as the queue has room."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                try:
                    return endpoint.send(frames, peer)
                except UnreachableError:
                    await asyncio.sleep(0)

    async def send_until_unreachable(self, endpoint: Endpoint, peer: RoutingId = b"") -> None:
        """Send until the transport has noticed that nobody is there any more."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                try:
                    endpoint.send([b"anyone?"], peer)
                except UnreachableError:
                    return
                await asyncio.sleep(0.001)

    async def bind_again(self, address: str) -> tuple[Endpoint, Inbox]:
        """Listen where another endpoint has just been closed; sockets take a moment to close."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                try:
                    return self.listen(address)
                except ConfigError:
                    await asyncio.sleep(0.001)


class Troubles:
    """The failures that an endpoint reports, and whether they are final."""

    def __init__(self) -> None:
        self.told: list[tuple[str, bool]] = []
        self._came = asyncio.Event()

    def __call__(self, text: str, is_final: bool) -> None:
        self.told.append((text, is_final))
        self._came.set()

    async def first(self) -> tuple[str, bool]:
        async with asyncio.timeout(LIMIT_S):
            await self._came.wait()
        return self.told[0]

    async def last(self) -> tuple[str, bool]:
        """Wait for what is final: on a busy machine an end may take another for gone at first."""
        async with asyncio.timeout(LIMIT_S):
            while not any(is_final for _, is_final in self.told):
                self._came.clear()
                await self._came.wait()
        return self.told[-1]


class Keyed:
    """A job with keys, whose ps 0 listens on loopback."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._transports: list[ZmqTransport] = []
        self.add(Owner("ps"), Owner("worker", 0), Owner("worker", 1))
        self.servers: dict[str, Owner] = {}
        self.restore: Callable[[], object] = lambda: None  # what a test has broken

    def add(self, *owners: Owner) -> None:
        add_keys(self.directory, {owner: make_pair() for owner in owners})

    def transport(self, security: Security) -> ZmqTransport:
        transport = ZmqTransport(security, linger_ms=0)
        self._transports.append(transport)
        return transport

    def listen(
        self, directory: Path | None = None, *, keyed: bool = True
    ) -> tuple[Endpoint, Inbox, Troubles]:
        directory = (directory or self.directory) if keyed else None
        transport = self.transport(Security(Owner("ps"), directory, insecure=not keyed))
        endpoint, inbox, troubles = transport.bind("tcp://127.0.0.1:0"), Inbox(), Troubles()
        self.servers[endpoint.address] = Owner("ps")
        endpoint.start(inbox)
        endpoint.on_failure(troubles)
        return endpoint, inbox, troubles

    def peer(
        self,
        address: str,
        owner: Owner,
        directory: Path | None = None,
        *,
        keyed: bool = True,
        patience_s: float = 0.0,
    ) -> tuple[Endpoint, Inbox, Troubles]:
        """Connect with the secret that a directory, by default the job's, has for a task."""
        known = (directory or self.directory) if keyed else None
        transport = self.transport(Security(owner, known, not keyed, self.servers, patience_s))
        endpoint, inbox, troubles = transport.connect(address), Inbox(), Troubles()
        endpoint.start(inbox)
        endpoint.on_failure(troubles)
        return endpoint, inbox, troubles

    def other_directory(self, name: str, owner: Owner) -> Path:
        """Make a directory in which a task has another key, but with the job's key of the ps."""
        other = self.directory.with_name(name)
        (ps,) = (e for e in read_registry(self.directory) if e.owner == Owner("ps"))
        add_keys(other, {Owner("ps"): Pair(ps.public, None), owner: make_pair()})
        return other

    def close(self) -> None:
        for transport in self._transports:
            transport.close()


def unused_ports() -> Iterator[str]:
    while True:
        (port,) = free_ports(1)
        yield f"tcp://127.0.0.1:{port}"


@pytest.fixture(scope="session", autouse=True)
def lent_before() -> None:
    """The first frame that is sent from where it lies has pyzmq start a thread, which stays."""
    transport = ZmqTransport(Security(insecure=True), linger_ms=0)
    transport.connect("tcp://127.0.0.1:1").send([bytes(COPIED_NBYTES + 1)])
    transport.close()


def transport_of(kind: str) -> Transport:
    if kind == "memory":
        return MemoryTransport()
    if kind == "simulated":
        loop: Any = asyncio.get_running_loop()  # in time that passes by itself
        network = Network(loop, Random(0), Weather(0.0, 0.0), lambda *_: None)
        return network.transport(Process("everyone"))
    return TransportByAddress(Security(insecure=kind == "tcp"))


async def lane_of(kind: str) -> AsyncIterator[Lane]:
    # A Unix socket's path has to be short, which tmp_path is not everywhere.
    with tempfile.TemporaryDirectory() as directory:
        addresses = {
            "memory": (f"tcp://127.0.0.1:{port}" for port in itertools.count(2000)),
            "tcp": unused_ports(),
            "loopback": unused_ports(),
            "simulated": (f"ipc://simulated/{number}" for number in itertools.count()),
            "unix": (f"unix://{directory}/{number}" for number in itertools.count()),
        }[kind]
        async with nothing_left():
            transport = transport_of(kind)
            lane = Lane(kind, transport, addresses)
            made = lane.made
            yield lane
            transport.close()
    del lane, transport
    if kind == "simulated":  # its network remembers who was there
        return
    if made:
        gc.collect()
    assert not made, f"still referenced: {list(made)}"


@pytest.fixture
async def keyed(tmp_path: Path) -> AsyncIterator[Keyed]:
    async with nothing_left():
        job = Keyed(tmp_path / "keys")
        yield job
        job.close()


@pytest.fixture(params=["memory", "tcp", "loopback", "unix", "simulated"])
async def lane(request: pytest.FixtureRequest) -> AsyncIterator[Lane]:
    async for lane in lane_of(request.param):
        yield lane


@pytest.fixture
async def tcp() -> AsyncIterator[Lane]:
    async for lane in lane_of("tcp"):
        yield lane


@pytest.fixture
async def unix() -> AsyncIterator[Lane]:
    async for lane in lane_of("unix"):
        yield lane
