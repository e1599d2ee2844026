"""What the actors of one process learn of each other's end, and of their addresses."""

from __future__ import annotations

import asyncio
from typing import Any

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
from zmqtrain.roles.hosting import check_own_address, run_all
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


FOREIGN = "203.0.113.1:2222"  # of no host: it is for documents
NAME = "zmqtrain.invalid:2222"  # perhaps that of a service in front of this host
MULTI, WITH_PS = "multi-worker-mirrored", "parameter-server"


def configured(strategy: str, *workers: str, index: int = 0, bind: str | None = None) -> TaskConfig:
    given: Any = {"members": workers, "workers": len(workers), "index": index, "bind": bind}
    return TaskConfig(role=Role.WORKER, job="job.py", ps=("127.0.0.1:1",), **given).under(strategy)


@pytest.mark.parametrize("index", [0, 1])
def test_worker_whose_address_is_of_another_host_is_told(index: int) -> None:
    workers = ["127.0.0.1:2222"]
    workers.insert(index, FOREIGN)
    with pytest.raises(ConfigError, match=rf"203.0.113.1:2222 for worker {index}, .*--index"):
        check_own_address(configured(MULTI, *workers, index=index))


@pytest.mark.parametrize(
    "config",
    [
        configured(MULTI, "127.0.0.1:2222", FOREIGN),
        configured(MULTI, "[::1]:2222", FOREIGN),
        configured(MULTI, NAME, FOREIGN),
        configured(MULTI, FOREIGN, bind="0.0.0.0"),
        configured(WITH_PS, FOREIGN),
    ],
)
def test_address_that_may_lead_here_or_is_not_needed_is_fine(config: TaskConfig) -> None:
    check_own_address(config)
