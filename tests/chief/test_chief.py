"""When the chief may end a job, and what a new generation means for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

import zmqtrain
from tests.chief.test_progress import STATUS
from tests.exchanges.test_contract import make_job
from tests.plans import planned
from zmqtrain.actors.client import Client
from zmqtrain.actors.link import Link
from zmqtrain.callbacks import Callback
from zmqtrain.chief.chief import Chief
from zmqtrain.chief.linked_job import LinkedJob
from zmqtrain.config.cluster import Role
from zmqtrain.config.task import TaskConfig
from zmqtrain.data import NoisyLine
from zmqtrain.errors import ExitCode, PeerLostError, RefusedError
from zmqtrain.models import LinearRegression
from zmqtrain.optim import SGD
from zmqtrain.protocol.status import Status
from zmqtrain.server.server import ParameterServer
from zmqtrain.transport.base import OnFailure
from zmqtrain.transport.memory import MemoryEndpoint, MemoryTransport
from zmqtrain.wire.codec import Envelope, Sender
from zmqtrain.wire.control import GetStatus, RequestStop
from zmqtrain.wire.messages import Done, Message, Parameters, Read


class Leader:
    """A link to the only ps, which is at one status, and at one version, after another."""

    peer = "ps 0"

    def __init__(self, told: list[tuple[int, bool]], versions: list[int]) -> None:
        """``told``: step and whether all is delivered, of each status."""
        self.told, self.versions = told, versions

    async def request(self, message: Message, reason: str) -> Envelope:
        if isinstance(message, Read):
            return Envelope(Parameters(self.versions.pop(0)), Sender("ps", 0))
        step, delivered = self.told.pop(0)
        return Envelope(replace(STATUS, step=step, all_delivered=delivered), Sender("ps", 0))


def task_of(role: Role, **more: Any) -> TaskConfig:
    timing = {"join_timeout_s": 60.0, "grace_s": 1.0, "heartbeat_s": 0.1}
    return TaskConfig.model_validate({"role": role, "job": "job", "workers": 1} | timing | more)


@asynccontextmanager
async def linked_to_ps(
    transport: MemoryTransport, running: Sequence[asyncio.Future[int]]
) -> AsyncIterator[Link]:
    """Give a link to ps 0 of actors that run, and end them all."""
    link = Link("ps 0", transport.connect("ipc://memory/0"), Client(1, 30.0))
    try:
        yield link
    finally:
        link.close()
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        transport.close()


async def status_of(link: Link) -> Status:
    return (await link.request(GetStatus(), reason="")).expect(Status)


async def until(link: Link, is_so: Callable[[Status], bool]) -> Status:
    """Return the first status of which this is so."""
    status = await status_of(link)
    while not is_so(status):
        await asyncio.sleep(0.01)
        status = await status_of(link)
    return status


@pytest.mark.parametrize(
    ("on_term", "code", "missing"), [("leave", ExitCode.OK, 1), ("end", ExitCode.INTERRUPTED, 2)]
)
async def test_stop_before_the_job_begins_ends_it_though_a_ps_is_missing(
    tmp_path: Path, on_term: str, code: ExitCode, missing: int
) -> None:
    """Engines restart what ends with another code. Nothing was learned that could be saved."""
    addresses = tuple(f"ipc://memory/{index}" for index in range(3))
    where = {"ps": addresses, "on_term": on_term, "lane": "tcp", "segment_dir": str(tmp_path)}
    transport, plan = MemoryTransport(), planned(make_job(), ps=3)
    servers = [
        ParameterServer(task_of(Role.PS, index=index, **where), plan, transport)
        for index in range(3)
        if index != missing
    ]
    chief = Chief(task_of(Role.CHIEF, **where), plan, transport, lambda status: None)
    running = [asyncio.ensure_future(actor.run()) for actor in (*servers, chief)]
    async with linked_to_ps(transport, running) as link, asyncio.timeout(30.0):
        status = await until(link, lambda s: any(task.role == Role.CHIEF for task in s.tasks))
        assert not status.initialised
        reply = await link.request(RequestStop(), reason="")
        ended = "stopped by zmqtrain stop before the job began: nothing to save"
        assert reply.expect(Done).text == ended
        assert await running[-1] == code
        assert {await each for each in running} == {code}


class WithState(LinearRegression):
    """Writes files for which it looks at a checkpoint."""

    suffixes = (".net",)

    def save(self, path: Any, weights: Any, at: Any = None) -> None:
        at(lambda *_: None, lambda checkpoint: Path(path).write_text(checkpoint.name))


@pytest.mark.parametrize("does", ["writes a file", "sets weights"])
async def test_ps_that_is_told_to_leave_while_a_callback_has_a_checkpoint_made_leaves_later(
    tmp_path: Path, does: str
) -> None:
    """With the checkpoint that it has asked for, which comes after the callback's."""
    loop, addresses, file = asyncio.get_running_loop(), ("ipc://memory/0",), tmp_path / "x.net"
    where = {"ps": addresses, "on_term": "leave", "lane": "tcp", "segment_dir": str(tmp_path)}
    transport = MemoryTransport()

    async def told_to_leave() -> None:
        server.stop(ExitCode.TERMINATED)
        await until(link, lambda status: bool(status.save_wanted))

    class Saving(Callback):
        def set_model(self, model: Any) -> None:
            """May save, as every hook between epochs may."""
            super().set_model(model)
            asyncio.run_coroutine_threadsafe(told_to_leave(), loop).result()
            if does == "writes a file":
                model.save(file)

        def on_train_begin(self, logs: Any = None) -> None:
            if does == "sets weights":
                self.model.set_weights(self.model.get_weights())

    fields = {"logdir": str(tmp_path / "logdir"), "callbacks": [Saving()], "save_secs": 0}
    plan = planned(zmqtrain.Job(model=WithState(), data=NoisyLine(), optimizer=SGD(), **fields))
    server = ParameterServer(task_of(Role.PS, grace_s=20.0, **where), plan, transport)
    chief = Chief(task_of(Role.CHIEF, **where), plan, transport, lambda status: None)
    running = [asyncio.ensure_future(actor.run()) for actor in (server, chief)]
    async with linked_to_ps(transport, running) as link, asyncio.timeout(15.0):
        assert await running[0] == ExitCode.TERMINATED
    found = (tmp_path / "logdir/checkpoints").glob("step-*")
    assert [each.name for each in found] == ["step-00000000"]
    assert file.exists() == (does == "writes a file")


class Closed(MemoryTransport):
    """Reaches the ps of another transport, one of which does not admit the key of this end."""

    def __init__(self, others: MemoryTransport, closed: str) -> None:
        super().__init__()
        self._others = others
        self._closed = closed

    def connect(self, address: str) -> MemoryEndpoint:
        if address != self._closed:
            return self._others.connect(address)
        return ClosedEnd(self, address, b"closed")


class ClosedEnd(MemoryEndpoint):
    def on_failure(self, callback: OnFailure) -> None:
        asyncio.get_running_loop().call_soon(callback, "it does not admit our key", True)


@pytest.mark.parametrize("has_begun", [True, False])
async def test_chief_that_a_ps_does_not_admit_ends_no_job_that_has_begun(
    tmp_path: Path, has_begun: bool
) -> None:
    """That ps may not have the registry yet; the next chief goes on. Else nothing is lost."""
    addresses = ("ipc://memory/0", "ipc://memory/1")
    where = {"ps": addresses, "on_term": "leave", "lane": "tcp", "segment_dir": str(tmp_path)}
    transport, plan = MemoryTransport(), planned(make_job(), ps=2)
    servers = [
        ParameterServer(task_of(Role.PS, index=index, **where), plan, transport)
        for index in range(2)
    ]

    def chief(over: MemoryTransport) -> asyncio.Future[int]:
        actor = Chief(task_of(Role.CHIEF, **where), plan, over, lambda status: None)
        return asyncio.ensure_future(actor.run())

    serving = [asyncio.ensure_future(server.run()) for server in servers]
    async with linked_to_ps(transport, serving) as link, asyncio.timeout(30.0):
        if has_begun:
            first = chief(transport)
            await until(link, lambda status: status.initialised)
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
        with pytest.raises(RefusedError, match="it does not admit our key"):
            await chief(Closed(transport, addresses[1]))
        if has_begun:
            status = await status_of(link)
            assert status.initialised and not status.stop
            assert not any(each.done() for each in serving)
        else:
            assert await serving[0] == ExitCode.REFUSED


@pytest.mark.parametrize(
    ("told", "versions", "is_given_up"),
    [
        ([(10, False), (10, False)], [10], False),
        ([(9, True), (10, False), (10, False)], [9, 10], False),
        ([(10, False), (10, True), (10, True)], [9, 10], False),
        ([(10, True), (10, True)], [9], True),
    ],
    ids=["level", "a step was made since", "the last update came since", "it cannot come"],
)
async def test_shards_are_asked_until_they_are_level_or_nothing_was_on_its_way(
    told: list[tuple[int, bool]],
    versions: list[int],
    is_given_up: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = LinkedJob(Chief(task_of(Role.CHIEF), planned(make_job()), MemoryTransport(), print))
    cluster.links = [cast(Link, Leader(told, versions))]
    with caplog.at_level(logging.WARNING):
        await cluster.settle()
    assert (told, versions) == ([], [])
    assert ("the shards end at versions" in caplog.text) is is_given_up


async def test_end_that_a_ps_is_not_told_of_is_logged_whatever_failed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    errors = [PeerLostError("ps 0 did not answer"), ValueError("a bug")]

    class Failing(Leader):
        async def request(self, message: Message, reason: str, timeout_s: float = 0) -> Envelope:
            raise errors.pop(0)

    cluster = LinkedJob(Chief(task_of(Role.CHIEF), planned(make_job()), MemoryTransport(), print))
    cluster.links = [cast(Link, Failing([], [])) for _ in errors]
    await cluster.shut_down(0, "step 10 of 10 is done", "")
    assert [(each.levelname, each.getMessage()) for each in caplog.records] == [
        ("WARNING", "ps 0 did not answer"),
        ("ERROR", "a ps was not told of the end: a bug"),
    ]
