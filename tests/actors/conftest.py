"""Actors in one process, and peers that do as they are told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tests.constants import Constants
from zmqtrain.actors import link
from zmqtrain.actors.actor import Actor
from zmqtrain.actors.link import Link
from zmqtrain.config.cluster import Role, Task
from zmqtrain.config.timing import Timing
from zmqtrain.observe.metrics import Metrics
from zmqtrain.transport.base import Endpoint, RoutingId
from zmqtrain.transport.memory import MemoryTransport
from zmqtrain.wire.buffers import Buffer, Tensor
from zmqtrain.wire.codec import Envelope, Sender, decode, encode
from zmqtrain.wire.control import Shutdown
from zmqtrain.wire.messages import Heartbeat, HeartbeatReply, Message

ADDRESS = "tcp://ps-0:2222"
HEARTBEAT_S = 0.01


@pytest.fixture
def resends_at_once(constants: Constants) -> None:
    """Have a link send what is not answered again at each heartbeat."""
    constants(link, RESEND_S=0.0)


class Mail:
    """Messages that one end of a connection received, and their senders."""

    def __init__(self) -> None:
        self.received: list[Envelope] = []
        self.peers: list[RoutingId] = []
        self._arrived = asyncio.Event()

    def take(self, peer: RoutingId, frames: list[Buffer]) -> Envelope:
        envelope = decode(frames)
        self.received.append(envelope)
        self.peers.append(peer)
        self._arrived.set()
        return envelope

    def of(self, kind: type) -> list[Envelope]:
        return [envelope for envelope in self.received if type(envelope.message) is kind]

    async def first(self, kind: type, count: int = 1) -> list[Envelope]:
        """The first messages of this kind, as soon as there are so many."""
        async with asyncio.timeout(10):
            while len(self.of(kind)) < count:
                self._arrived.clear()
                await self._arrived.wait()
        return self.of(kind)[:count]

    async def next(self, kind: type, count: int = 1) -> list[Envelope]:
        """Wait for the next ``count`` messages of this kind."""
        seen = len(self.of(kind))
        return (await self.first(kind, seen + count))[seen:]


class FakePs(Mail):
    """Listens; answers heartbeats with ``alive`` (None: not at all) and nothing else by itself."""

    def __init__(self, transport: MemoryTransport, address: str = ADDRESS) -> None:
        super().__init__()
        self.alive: Message | None = HeartbeatReply()
        self.ignores: Callable[[Envelope], bool] = lambda envelope: False
        self._endpoint = transport.bind(address)
        self._endpoint.start(self._on_message)

    def reply(self, request: Envelope, message: Message, tensors: tuple[Tensor, ...] = ()) -> None:
        self.send(message, request.request_id, tensors)

    def send(self, message: Message, request_id: int = 0, tensors: tuple[Tensor, ...] = ()) -> None:
        """Send to the peer that was heard last."""
        self.send_frames(encode(Envelope(message, Sender("ps", 0), request_id, 5, tensors)))

    def send_frames(self, frames: list[Buffer]) -> None:
        self._endpoint.send(frames, self.peers[-1])

    def _on_message(self, peer: RoutingId, frames: list[Buffer]) -> None:
        if self.ignores(decode(frames)):
            return
        envelope = self.take(peer, frames)
        if type(envelope.message) is Heartbeat and self.alive is not None:
            self.reply(envelope, self.alive)


class Client(Mail):
    """A connected end that sends what it is told."""

    def __init__(self, transport: MemoryTransport, address: str, sender: Sender) -> None:
        super().__init__()
        self._sender = sender
        self._endpoint: Endpoint = transport.connect(address)
        self._endpoint.start(self.take)

    def send(self, message: Message, request_id: int, generation: int = 0) -> None:
        self.send_frames(encode(Envelope(message, self._sender, request_id, generation)))

    def send_frames(self, frames: list[Buffer]) -> None:
        self._endpoint.send(frames)


class Worker(Actor):
    """An actor with one link, to the ps at ``ADDRESS``; what is asked there is up to the test."""

    def __init__(
        self, transport: MemoryTransport, peer_timeout_s: float = 60.0, *, joined: bool = True
    ) -> None:
        timing = Timing(heartbeat_s=HEARTBEAT_S, lease_s=5, peer_timeout_s=peer_timeout_s)
        super().__init__(Task(Role.WORKER, 3), transport, Metrics("worker", 3), timing)
        self.incarnation, self.generation = 2, 5
        self.linked = asyncio.Event()
        self.told: asyncio.Queue[Message] = asyncio.Queue()
        self.handlers[Shutdown] = lambda request, message: self.told.put_nowait(message)
        self.on_beat: Callable[[], None] = lambda: None
        self._joined = joined

    @property
    def ps(self) -> Link:
        return self.links[0]

    def ask(self, message: Message, **options: Any) -> asyncio.Task[Envelope]:
        """Send a request; the task ends as its reply or its failure says."""
        options = {"reason": "it has not answered"} | options
        asked = self._push if "sequence" in options else self.ps.request
        return asyncio.get_running_loop().create_task(asked(message, **options))

    async def _push(self, message: Message, **options: Any) -> Envelope:
        outstanding = self.ps.begin(message, **options)
        try:
            return await outstanding.future
        finally:
            self.ps.end(outstanding)

    def count(self, name: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"zmqtrain_{name}_total")

    def heartbeat(self) -> Heartbeat:
        self.on_beat()
        return Heartbeat(waits=self.waits.snapshot(), saved_step=7)

    async def main(self) -> int:
        self.link(Task(Role.PS, 0), ADDRESS).joined = self._joined
        self.linked.set()
        await self.stopping.wait()
        return self.stop_code


@pytest.fixture(autouse=True)
async def no_stray_errors() -> AsyncIterator[None]:
    """Fail the test if a callback raises; asyncio would only log it."""
    stray: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: stray.append(context))
    yield
    assert stray == []


@pytest.fixture
def transport() -> MemoryTransport:
    return MemoryTransport()


@pytest.fixture
def start_ps(transport: MemoryTransport) -> Callable[[], FakePs]:
    return lambda: FakePs(transport)


@pytest.fixture
async def ps(start_ps: Callable[[], FakePs]) -> FakePs:
    return start_ps()


@pytest.fixture
async def run() -> AsyncIterator[Callable[[Actor], asyncio.Task[int]]]:
    """Run actors; those that still live after the test are ended."""
    tasks: list[asyncio.Task[int]] = []

    def start(actor: Actor) -> asyncio.Task[int]:
        tasks.append(asyncio.get_running_loop().create_task(actor.run()))
        return tasks[-1]

    yield start
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
async def start_worker(
    transport: MemoryTransport, run: Callable[[Actor], asyncio.Task[int]]
) -> Callable[..., Any]:
    async def start(peer_timeout_s: float = 60.0, *, joined: bool = True) -> Worker:
        worker = Worker(transport, peer_timeout_s, joined=joined)
        run(worker)
        await worker.linked.wait()
        return worker

    return start


@pytest.fixture
async def worker(start_worker: Callable[..., Any]) -> Worker:
    joined: Worker = await start_worker()
    return joined


@pytest.fixture
def client(transport: MemoryTransport) -> Callable[..., Client]:
    def connect(address: str, role: str = "worker", index: int = 0) -> Client:
        return Client(transport, address, Sender(role, index, 1))

    return connect


@pytest.fixture
def timing() -> Timing:
    return Timing(heartbeat_s=HEARTBEAT_S, lease_s=5, peer_timeout_s=60)
