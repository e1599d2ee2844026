"""What the actors of one process learn of each other's end."""

from __future__ import annotations

import asyncio

import pytest

from zmqtrain import Job
from zmqtrain.actors.task import JobActor
from zmqtrain.config.cluster import Role
from zmqtrain.config.task import TaskConfig
from zmqtrain.data import NoisyLine
from zmqtrain.errors import ConfigError, PeerLostError, ZmqTrainError
from zmqtrain.fingerprint import changes_since, fingerprint_difference
from zmqtrain.models import LinearRegression
from zmqtrain.optim import SGD
from zmqtrain.roles.hosting import run_all
from zmqtrain.transport.memory import MemoryTransport

JOB = Job(model=LinearRegression(), data=NoisyLine(), optimizer=SGD(0.1))
MISTAKE, LOSS = ConfigError("a mistake"), PeerLostError("a loss")


class Stub(JobActor):
    """Runs until it is stopped, or fails at once; remembers what ended it."""

    def __init__(self, role: Role, failure: Exception | None = None, *, joined: bool = True):
        config = TaskConfig(role=role, job="job.py", ps=("127.0.0.1:2222",), workers=1)
        super().__init__(config, JOB, MemoryTransport())
        self.failure, self.joined = failure, joined
        self.started, self.ended_by = asyncio.Event(), list[BaseException | None]()

    def ready(self) -> tuple[bool, str]:
        return self.joined, ""

    async def main(self) -> int:
        self.started.set()
        if self.failure is not None:
            raise self.failure
        await self.stopping.wait()
        return self.stop_code

    def on_end(self, error: BaseException | None) -> None:
        self.ended_by.append(error)


@pytest.mark.parametrize(
    ("failure", "serve_on", "joined"),
    [(MISTAKE, False, True), (MISTAKE, True, False), (LOSS, True, True)],
)
async def test_failed_worker_ends_its_ps_which_learns_why(
    failure: ZmqTrainError, serve_on: bool, joined: bool
) -> None:
    ps = Stub(Role.PS)
    with pytest.raises(type(failure)):
        await run_all([ps, Stub(Role.WORKER, failure, joined=joined)], serve_on=serve_on)
    assert ps.ended_by == [failure]


async def test_ps_of_a_worker_with_a_mistake_serves_until_the_job_ends() -> None:
    ps = Stub(Role.PS)
    running = asyncio.ensure_future(run_all([ps, Stub(Role.WORKER, MISTAKE)], serve_on=True))
    await ps.started.wait()
    await asyncio.wait([running], timeout=0.1)
    assert not running.done()
    ps.stop(0)
    with pytest.raises(ConfigError):
        await running
    assert ps.ended_by == [None]


async def test_failed_ps_ends_its_worker() -> None:
    worker = Stub(Role.WORKER)
    with pytest.raises(ConfigError):
        await run_all([Stub(Role.PS, MISTAKE), worker], serve_on=True)
    assert worker.stop_code == 0
    assert len(worker.ended_by) == 1


async def test_workers_without_ps_must_agree_how_many_they_are() -> None:
    def fingerprint(workers: int, *, hosted: bool) -> dict[str, str]:
        ps = ("127.0.0.1:2222",)
        config = TaskConfig(role=Role.WORKER, job="j", ps=ps, workers=workers, hosted=hosted)
        return JobActor(config, JOB, MemoryTransport()).fingerprint

    here = fingerprint(2, hosted=True)
    assert "workers: 3 there, 2 here" in fingerprint_difference(fingerprint(3, hosted=True), here)
    assert changes_since(fingerprint(3, hosted=True), here) == ""  # at a checkpoint
    then = here | {"policy": "hogwild", "source": "50138ed1e192"}
    changes = changes_since(then, here | {"policy": "test", "source": "111bba79e58f"})
    assert changes == "policy: hogwild then, test now; source: another than then"
    assert fingerprint(3, hosted=False) == fingerprint(2, hosted=False)
