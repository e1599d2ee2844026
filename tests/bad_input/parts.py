"""Jobs to spoil, and a ps with whoever a test needs around it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tests.plans import planned
from zmqtrain import Job
from zmqtrain.config.cluster import Role
from zmqtrain.config.task import TaskConfig
from zmqtrain.data import NoisyLine
from zmqtrain.models import LinearRegression, base
from zmqtrain.models.base import Batch, Gradients
from zmqtrain.optim import SGD
from zmqtrain.server.server import ParameterServer
from zmqtrain.transport.base import RoutingId
from zmqtrain.transport.memory import MemoryTransport
from zmqtrain.wire.buffers import Buffer, Tensor
from zmqtrain.wire.codec import Envelope, Sender, decode, encode
from zmqtrain.wire.control import Initialize
from zmqtrain.wire.messages import (
    Join,
    Message,
    Parameters,
    Pull,
    PullReply,
    Push,
    PushReply,
    Read,
    Refusal,
    Welcome,
)

PS = ("ipc://memory/0", "ipc://memory/1")
LIMIT_S = 10.0


class Someone:
    """A connected peer that sends any message and reads the replies."""

    def __init__(self, transport: MemoryTransport, address: str, role: str, index: int) -> None:
        self.sender = Sender(role, index)
        self.generation = 0
        self._endpoint = transport.connect(address)
        self._endpoint.start(self._receive)
        self.on_received: Callable[[Envelope], object] = lambda envelope: None
        self._replies: dict[int, asyncio.Future[Envelope]] = {}
        self._last_id = 0

    async def ask(self, message: Message, *tensors: Any) -> Envelope:
        """Send a request and return its reply."""
        self._last_id += 1
        reply = self.expect(self._last_id)
        sent = tuple(
            tensor if isinstance(tensor, Tensor) else Tensor.of(tensor) for tensor in tensors
        )
        self.send(encode(Envelope(message, self.sender, self._last_id, self.generation, sent)))
        async with asyncio.timeout(LIMIT_S):
            return await reply

    def expect(self, request_id: int) -> asyncio.Future[Envelope]:
        """Return what will be the reply to a request."""
        reply = self._replies[request_id] = asyncio.get_running_loop().create_future()
        return reply

    async def refused(self, message: Message, *tensors: Any) -> tuple[str, str]:
        """Send what is wrong; return the kind of error and its text."""
        reply = (await self.ask(message, *tensors)).message
        assert isinstance(reply, Refusal), reply
        return reply.error, reply.text

    def send(self, frames: Sequence[Buffer]) -> None:
        self._endpoint.send(frames)

    def be(self, incarnation: int, generation: int) -> None:
        self.sender = replace(self.sender, incarnation=incarnation)
        self.generation = generation

    async def join(self, fingerprint: dict[str, str]) -> None:
        """Become a member."""
        reply = await self.ask(Join(f"{self.sender}/1", fingerprint, "here:1", "", "", 0))
        assert isinstance(reply.message, Welcome), reply.message
        self.be(reply.message.incarnation, reply.generation)

    def _receive(self, peer: RoutingId, frames: list[Buffer]) -> None:
        envelope = decode(frames)
        self.on_received(envelope)
        if (reply := self._replies.pop(envelope.request_id, None)) is not None:
            reply.set_result(envelope)


class Table:
    """A live ps, and everyone who talks to it."""

    def __init__(self, job: Job, index: int = 0) -> None:
        self.transport = MemoryTransport()
        plan = planned(job, ps=1 + index, workers=2)
        self.fingerprint = plan.fingerprint()
        config = TaskConfig(
            role=Role.PS, job="job.py", index=index, ps=PS[: 1 + index], workers=2, lane="memory"
        )
        self.ps = ParameterServer(config, plan, self.transport)
        self.zeros = np.zeros(plan.layouts[index].size, np.float32)
        self._address = PS[index]

    def someone(self, role: str, index: int = 0) -> Someone:
        return Someone(self.transport, self._address, role, index)

    async def member(self, role: str, index: int = 0) -> Someone:
        someone = self.someone(role, index)
        await someone.join(self.fingerprint)
        return someone

    async def begin(self) -> Someone:
        """Have a chief begin generation 1; return it."""
        chief = await self.member("chief")
        chief.generation = 1
        await chief.ask(Initialize(None))
        return chief

    async def worker(self, index: int = 0) -> tuple[Someone, list[int]]:
        """Return a worker that was let in, and the batches it holds."""
        worker = await self.member("worker", index)
        reply = (await worker.ask(Pull())).message
        assert isinstance(reply, PullReply)
        return worker, list(reply.batches)

    async def check(self, worker: Someone, batches: list[int], sequence: int = 1) -> None:
        """Have the worker do a right step, which must count."""
        before = await self.version()
        reply = await worker.ask(Push(sequence, before, batches[0], 20, 0.5), self.zeros)
        assert isinstance(reply.message, PushReply)
        assert (reply.message.result, reply.message.version) == ("applied", before + 1)

    async def version(self) -> int:
        """Return the shard's version once all that has come so far is done."""
        reply = (await self.someone("client", 8).ask(Read(values=False))).message
        assert isinstance(reply, Parameters)
        return reply.version


@asynccontextmanager
async def table(job: Job, index: int = 0) -> AsyncIterator[Table]:
    """Run a ps, with whoever a test needs around it; that it fails is an error of the block."""
    table = Table(job, index)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(table.ps.run())
        yield table
        assert not running.done()
        running.cancel()


class Line:
    """A sound model, written as a user would: a class with three methods and nothing else."""

    def __init__(self) -> None:
        self.inner = LinearRegression()

    def parameters(self, seed: int) -> dict[str, Any]:
        return self.inner.parameters(seed)

    def loss_and_gradients(
        self, parameters: base.Parameters, batch: Batch, out: Gradients
    ) -> float:
        return self.inner.loss_and_gradients(parameters, batch, out)

    def metrics(self, parameters: base.Parameters, batch: Batch) -> dict[str, float]:
        return self.inner.metrics(parameters, batch)


@dataclass(frozen=True)
class Spoilt:
    """A sound model but for one method, which is given as a function of what the method returns
    and of its arguments."""

    method: str
    spoil: Callable[..., Any]

    def parameters(self, seed: int) -> Any:
        return self._call("parameters", seed)

    def loss_and_gradients(self, parameters: base.Parameters, batch: Batch, out: Gradients) -> Any:
        return self._call("loss_and_gradients", parameters, batch, out)

    def metrics(self, parameters: base.Parameters, batch: Batch) -> Any:
        return self._call("metrics", parameters, batch)

    def _call(self, method: str, *arguments: Any) -> Any:
        sound = getattr(LinearRegression(), method)(*arguments)
        return self.spoil(sound, *arguments) if method == self.method else sound

    def __repr__(self) -> str:
        return "Spoilt()"


def make_job(**fields: Any) -> Job:
    """Return a job of a few hundred quick steps, some fields of which are wrong."""
    sound = {"model": Line(), "data": NoisyLine(), "optimizer": SGD(0.1), "batch_size": 20}
    return Job(**sound | {"steps": 200} | fields)
