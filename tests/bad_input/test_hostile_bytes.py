"""A ps at a real socket under hostile messages, while a real worker trains on through them.

What is no message of this protocol version is answered and counted; what is one, but not in order,
is answered. Nothing else comes of either.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import tracemalloc
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq

from tests.bad_input.parts import make_job
from tests.harness import free_ports
from zmqtrain import Job
from zmqtrain.actors.task import JobActor
from zmqtrain.chief.chief import Chief
from zmqtrain.config.cluster import Role
from zmqtrain.config.task import TaskConfig
from zmqtrain.exchanges.worker import Worker
from zmqtrain.planning.plan import plan_for
from zmqtrain.server.server import ParameterServer
from zmqtrain.transport.base import RoutingId
from zmqtrain.transport.router_dealer import ZmqTransport
from zmqtrain.transport.security import Security
from zmqtrain.wire.buffers import Buffer, Tensor
from zmqtrain.wire.codec import Envelope, Sender, decode, encode
from zmqtrain.wire.messages import (
    PROTOCOL_VERSION,
    Chunk,
    Heartbeat,
    Initialize,
    Join,
    Leave,
    Message,
    Pull,
    Push,
    Read,
    Refusal,
    Shutdown,
    Welcome,
)
from zmqtrain.wire.refusals import MAX_TEXT

pytestmark = pytest.mark.integration


LIMIT_S = 30.0
ROUNDS = 4  # of one message of each kind
SIZE = 2  # of the job's gradient
GROWTH_NBYTES = 1 << 18
"""What hundreds of hostile messages may leave behind: less than 1 KiB each, and they carry more."""


class Connection:
    """Someone who is connected to the ps and keeps what it answers."""

    def __init__(self, transport: ZmqTransport, address: str) -> None:
        self._endpoint = transport.connect(address)
        self._answers: asyncio.Queue[Envelope] = asyncio.Queue()
        self._endpoint.start(self._receive)

    async def ask(self, frames: Sequence[Buffer]) -> Envelope:
        """Send whatever this is; return the one answer that it gets."""
        assert self._answers.empty()
        self._endpoint.send(frames)
        async with asyncio.timeout(LIMIT_S):
            return await self._answers.get()

    def _receive(self, _: RoutingId, frames: list[Buffer]) -> None:
        self._answers.put_nowait(decode(frames))


class Siege:
    """A job of one worker, all of it in this process, and its enemies."""

    def __init__(self, job: Job) -> None:
        (port,) = free_ports(1)
        self.address = f"127.0.0.1:{port}"
        plan = plan_for(job, self._config(Role.PS).cluster)
        self.fingerprint = plan.fingerprint()
        self.transport = ZmqTransport(Security(insecure=True))
        self.ps = ParameterServer(self._config(Role.PS), plan, self.transport)
        self.chief = Chief(self._config(Role.CHIEF), plan, self.transport, lambda status: None)
        self.worker = Worker(self._config(Role.WORKER), plan, self.transport)
        self.actors: list[JobActor] = [self.ps, self.chief, self.worker]
        self.stranger = self.connect()
        self.traitor = self.connect()  # knows the job and joins it as worker 1
        self.as_traitor = Sender("worker", 1)
        self.as_earlier_traitor = self.as_traitor

    def connect(self) -> Connection:
        return Connection(self.transport, f"tcp://{self.address}")

    @property
    def decode_errors(self) -> float:
        registry = self.ps.metrics.registry
        return registry.get_sample_value("zmqtrain_decode_errors_total") or 0.0

    @property
    def steps(self) -> float:
        return self.worker.metrics.registry.get_sample_value("zmqtrain_steps_total") or 0.0

    async def betray(self) -> None:
        """Have the traitor join, and once more, so that its earlier life is over."""
        await self.trained(5)
        for life in (1, 2):
            self.as_earlier_traitor = self.as_traitor
            join = Join(f"traitor/{life}", self.fingerprint, "there:1", "", "", 0)
            welcome = (await self.traitor.ask(self.told(join, Sender("worker", 1)))).message
            assert isinstance(welcome, Welcome)
            self.as_traitor = Sender("worker", 1, welcome.incarnation)
        await self.traitor.ask(self.told(Pull(), self.as_traitor))

    def told(
        self, message: Message, sender: Sender, *tensors: Any, request_id: int = 7
    ) -> list[bytes]:
        sent = tuple(map(Tensor.of, tensors))
        frames = encode(Envelope(message, sender, request_id, self.ps.generation, sent))
        return [bytes(frame) for frame in frames]

    async def trained(self, steps: int) -> None:
        """Wait for further steps of the worker."""
        before = self.steps
        async with asyncio.timeout(LIMIT_S):
            while self.steps < before + steps:
                await self.stranger.ask(self.told(Read(values=False), Sender("client", 9)))

    def _config(self, role: Role) -> TaskConfig:
        return TaskConfig(role=role, job="job.py", ps=(self.address,), workers=1, lane="tcp")


@asynccontextmanager
async def besieged(job: Job) -> AsyncIterator[Siege]:
    """A job that trains; that one of its tasks fails is an error of the block."""
    siege = Siege(job)
    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(actor.run()) for actor in siege.actors]
            await siege.betray()
            yield siege
            await siege.trained(5)
            await siege.traitor.ask(siege.told(Leave("enough"), siege.as_traitor))
            siege.chief.stop(0)
            async with asyncio.timeout(LIMIT_S):
                codes = await asyncio.gather(*running)
            assert codes == [0, 0, 0]
    finally:
        siege.transport.close()
    assert siege.chief.summary is not None
    assert siege.chief.summary.pushes["refused"] == 0


@dataclass(frozen=True)
class Hostile:
    """What is sent, by whom, and what it has to come to."""

    kind: str
    frames: list[bytes]
    by_traitor: bool = False
    is_message: bool = False  # so it is refused, but no error of decoding


def hostile_messages(siege: Siege, dice: Random) -> Iterator[Hostile]:
    """Yield one message of each kind."""
    yield from noise(dice)
    yield from truncated(siege, dice)
    yield from wrong_dtypes(siege, dice)
    yield from other_versions(siege, dice)
    yield from other_layouts(siege, dice)
    yield from replayed(siege, dice)


def noise(dice: Random) -> Iterator[Hostile]:
    parts = [dice.randbytes(dice.randrange(200)) for _ in range(dice.randrange(1, 5))]
    yield Hostile("random frames", parts)
    yield Hostile("nothing", [b""] * dice.randrange(1, 4))
    yield Hostile("another protocol", [b"GET / HTTP/1.1\r\nHost: ps\r\n\r\n"])


def truncated(siege: Siege, dice: Random) -> Iterator[Hostile]:
    push = Push(1, 0, 0, 20, 0.5)
    large = np.zeros(dice.randrange(2000, 700_000), np.float32)
    header, *frames = siege.told(push, siege.as_traitor, large)
    yield Hostile("cut header", [header[: dice.randrange(1, len(header))]])
    yield Hostile("lost frames", [header, *frames[: dice.randrange(len(frames))]])
    yield Hostile("cut frame", [header, *frames[:-1], frames[-1][: dice.randrange(1000)]])
    yield Hostile("frame too many", [header, *frames, dice.randbytes(9)])


def wrong_dtypes(siege: Siege, dice: Random) -> Iterator[Hostile]:
    for dtype in dice.sample(["|O", ">f4", "<c16", "<M8[s]", "V8", "", None, 4, ["<f4"]], 4):
        yield Hostile("no dtype", [described(siege, [dtype, [SIZE], bytes(8)])])
    dtype = dice.choice(["<f2", "<f8", "<i4", "|u1"])
    frames = siege.told(next_push(siege), siege.as_traitor, np.zeros(SIZE, dtype))
    yield Hostile("wrong dtype", frames, by_traitor=True, is_message=True)


def other_versions(siege: Siege, dice: Random) -> Iterator[Hostile]:
    (header,) = siege.told(Heartbeat(), siege.as_traitor)
    for version in (0, PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1, dice.randrange(9, 1 << 60)):
        parts = [version, *msgpack.unpackb(header)[1 : dice.randrange(1, 8)]]
        yield Hostile("other version", [msgpack.packb(parts)])


def other_layouts(siege: Siege, dice: Random) -> Iterator[Hostile]:
    other = siege.fingerprint | {"seed": str(dice.randrange(1, 99))}
    join = Join("stranger/1", other, "there:2", "", "", 0)
    yield Hostile("other job", siege.told(join, Sender("worker", 2)), is_message=True)
    endless = siege.fingerprint | {str(n): "y" * dice.randrange(9000) for n in range(100)}
    join = Join("stranger/1", endless, "there:2", "", "", 0)
    yield Hostile("endless job", siege.told(join, Sender("worker", 2)), is_message=True)
    size = dice.choice([0, 1, 3, 1000, 600_000])
    push, chunk = next_push(siege), Chunk(next_push(siege).sequence, dice.choice([-1, 0, 1, 9]))
    for message, gradient in ((push, size), (chunk, size)):
        frames = siege.told(message, siege.as_traitor, np.zeros(gradient, np.float32))
        yield Hostile("other layout", frames, by_traitor=True, is_message=True)
    frames = siege.told(push, siege.as_traitor, *[np.zeros(SIZE, np.float32)] * 2)
    yield Hostile("other layout", frames, by_traitor=True, is_message=True)


def replayed(siege: Siege, dice: Random) -> Iterator[Hostile]:
    """What was right once, or is right from others, said by one who only listened."""
    gradient = np.zeros(SIZE, np.float32)
    worker = siege.worker.identify()[0]
    old = Push(dice.randrange(1, 4), 0, 0, 20, 0.5)
    yield Hostile("old push", siege.told(old, worker, gradient), is_message=True)
    unknown = [siege.as_earlier_traitor, replace(worker, incarnation=dice.randrange(1, 1 << 40))]
    for sender in unknown:
        for message in (next_push(siege), Pull(), Heartbeat(), Leave("go")):
            yield Hostile("earlier life", siege.told(message, sender), is_message=True)
    for message in (Initialize(None), Shutdown(0, "it is over")):
        yield Hostile("false chief", siege.told(message, Sender("chief", 0, 5)), is_message=True)


def described(siege: Siege, tensor: list[Any]) -> bytes:
    """Return the header of a push that says this of its tensor."""
    header = msgpack.unpackb(siege.told(next_push(siege), siege.as_traitor)[0])
    return msgpack.packb([*header[:-1], [tensor]])


def next_push(siege: Siege) -> Push:
    """Return the push that the traitor's would be, were it in order."""
    return Push(1, siege.ps.state.version, 0, 20, 0.5)


async def suffer(siege: Siege, dice: Random) -> int:
    """Have one hostile message of each kind refused; return how many there were."""
    count = 0
    for hostile in hostile_messages(siege, dice):
        errors = siege.decode_errors
        sender = siege.traitor if hostile.by_traitor else siege.stranger
        answer = await sender.ask(hostile.frames)
        assert isinstance(answer.message, Refusal), (hostile.kind, answer)
        assert 0 < len(answer.message.text) <= MAX_TEXT
        assert siege.decode_errors - errors == (not hostile.is_message), (hostile.kind, answer)
        assert answer.request_id == 7 or not hostile.is_message
        count += 1
    return count


@pytest.fixture
def traced() -> Iterator[None]:
    """What is allocated is counted, and nothing is logged: pytest keeps what is."""
    logging.disable()
    tracemalloc.start()
    yield
    tracemalloc.stop()
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("traced")
async def test_hostile_messages_leave_nothing_behind() -> None:
    dice = Random(3)
    async with besieged(make_job(steps=10**9)) as siege:
        await suffer(siege, dice)
        await siege.trained(100)
        await suffer(siege, dice)  # what this leaves is replaced by what follows
        gc.collect()
        before, count = tracemalloc.get_traced_memory()[0], 0
        for _ in range(ROUNDS):
            count += await suffer(siege, dice)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
        assert count > 100
        assert grown < GROWTH_NBYTES


async def test_address_of_another_connection_cannot_be_taken() -> None:
    async with besieged(make_job(steps=10**9)) as siege:
        member = siege.ps.peers.get("worker", 0)
        assert member is not None
        errors = siege.decode_errors
        with zmq.Context() as context, context.socket(zmq.DEALER) as thief:
            thief.setsockopt(zmq.IDENTITY, member.contact.peer)
            thief.setsockopt(zmq.LINGER, 0)
            with thief.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED) as connected:
                thief.connect(f"tcp://{siege.address}")
                thief.send_multipart([b"noise"])
                assert await asyncio.to_thread(connected.poll, LIMIT_S * 1000)
                await siege.stranger.ask([b"noise"])
                await siege.trained(100)
        assert siege.decode_errors == errors + 1  # the stranger's
