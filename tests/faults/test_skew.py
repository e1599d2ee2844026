"""Tasks of neighbouring protocol versions, as there are while a cluster is brought up to date."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgpack
import pytest

from simulation.faults import Fault
from simulation.loop import current_process
from simulation.run import simulate
from tests.plans import planned
from tests.traces import calm
from zmqtrain import Job
from zmqtrain.actors import actor, link
from zmqtrain.actors.task import JobActor
from zmqtrain.config.cluster import Role
from zmqtrain.config.task import TaskConfig
from zmqtrain.data import NoisyLine
from zmqtrain.errors import ExitCode, ProtocolError
from zmqtrain.hosting.actors import actors_of
from zmqtrain.models import LinearRegression
from zmqtrain.optim import SGD
from zmqtrain.transport.base import RoutingId
from zmqtrain.transport.memory import MemoryTransport
from zmqtrain.wire.buffers import Buffer
from zmqtrain.wire.codec import Envelope, Sender, decode, encode
from zmqtrain.wire.messages import PROTOCOL_VERSION, Join, Refusal

PS = ("ipc://memory/0", "ipc://memory/1")
LIMIT_S = 10.0
OTHERS = (PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1)
REMEDY = "install the same zmqtrain on every host"

Frames = list[Buffer]


def relabelled(frames: Frames, version: int) -> Frames:
    """Return a message as a task of another version would label it."""
    return [msgpack.packb([version, *msgpack.unpackb(frames[0])[1:]]), *frames[1:]]


def both(version: int) -> str:
    return f"the peer speaks protocol version {version}, this task version {PROTOCOL_VERSION}: "


@pytest.fixture
def make() -> Callable[[Role, MemoryTransport], JobActor]:
    """Makes a task of a job of two ps."""
    job = Job(
        model=LinearRegression(), data=NoisyLine(), optimizer=SGD(0.1), steps=9, partition_nbytes=4
    )

    def make(role: Role, transport: MemoryTransport) -> JobActor:
        index = 1 if role is Role.PS else 0
        config = TaskConfig(role=role, job="job.py", index=index, ps=PS, workers=1, lane="memory")
        plan = planned(job, ps=2)
        (actor,) = actors_of(config, plan, lambda _: transport, lambda status: None)
        return actor

    return make


@pytest.mark.parametrize("version", OTHERS)
@pytest.mark.parametrize("role", Role)
async def test_task_that_joins_a_ps_of_another_version_leaves_with_both_versions(
    role: Role, version: int, make: Callable[..., JobActor]
) -> None:
    transport = MemoryTransport()
    listener = transport.bind(PS[0])

    def refuse(peer: RoutingId, frames: Frames) -> None:
        refusal = Refusal("ProtocolError", "what such a ps says of it")
        reply = Envelope(refusal, Sender("ps", 0), decode(frames).request_id)
        listener.send(relabelled(encode(reply), version), peer)

    listener.start(refuse)
    with pytest.raises(ProtocolError) as raised:
        async with asyncio.timeout(LIMIT_S):
            await make(role, transport).run()
    assert str(raised.value) == f"ps 0 at {PS[0]}: {both(version)}{REMEDY}"
    assert raised.value.exit_code == ExitCode.REFUSED


@pytest.mark.parametrize("version", OTHERS)
async def test_ps_tells_a_task_of_another_version_both_and_waits_for_others(
    version: int, make: Callable[..., JobActor]
) -> None:
    transport = MemoryTransport()
    running = asyncio.ensure_future(make(Role.PS, transport).run())
    heard: asyncio.Queue[Envelope] = asyncio.Queue()
    end = transport.connect(PS[1])
    end.start(lambda _, frames: heard.put_nowait(decode(frames)))
    join = encode(Envelope(Join("n/1", {}, "here:1", "", "", 0), Sender("worker", 0), 7))
    async with asyncio.timeout(LIMIT_S):
        end.send(relabelled(join, version))
        answer = await heard.get()
        assert answer.request_id == 7
        assert answer.message == Refusal("ProtocolError", f"{both(version)}{REMEDY}")
        end.send(join)
        assert "runs another job than ps 1" in str((await heard.get()).message)
    assert not running.done()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def test_task_whose_ps_comes_back_in_another_version_starts_again_and_leaves_with_both_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tasks of two versions do not work together, and none of them waits for that for ever."""
    version = PROTOCOL_VERSION + 1
    lines: list[str] = []

    def is_newer() -> bool:
        return str(current_process()) == "ps 0" and any("ps 0 is killed" in line for line in lines)

    def encoded(envelope: Envelope) -> Frames:
        frames: Frames = encode(envelope)
        return relabelled(frames, version) if is_newer() else frames

    def decoded(frames: Frames) -> Envelope:
        return decode(relabelled(frames, PROTOCOL_VERSION - 1) if is_newer() else frames)

    for module in (actor, link):
        monkeypatch.setattr(module, "encode", encoded)
        monkeypatch.setattr(module, "decode", decoded)
    monkeypatch.setattr("simulation.run.decode", lambda frames: "a message")
    monkeypatch.setattr("simulation.monitor.MessageMonitor.saw", lambda *_: False)

    kill = Fault(0.5, "kill", ("ps 0",), 0.2)
    report = simulate(calm(ps=1, workers=2, faults=(kill,)), lines.append)
    assert report.broken == "the job did not end in order"
    for name in ("worker 0", "worker 1", "chief 0"):
        first, last = (line for line in lines if f" {name} ended: " in line)
        assert "PeerLostError (ps 0 at ipc://simulated/0 has been silent for " in first
        assert f"ProtocolError (ps 0 at ipc://simulated/0: {both(version)}{REMEDY})" in last
        assert last.endswith(f"exit code {ExitCode.REFUSED:d}")
