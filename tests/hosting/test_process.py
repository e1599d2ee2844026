"""Actors of one process: their ends reach each other, and their addresses are checked."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from typing import Any

import pytest

from tests.plans import planned
from zmqtrain import Job
from zmqtrain.actors.task import JobActor
from zmqtrain.config.cluster import Role
from zmqtrain.config.task import TaskConfig
from zmqtrain.data import NoisyLine
from zmqtrain.errors import ConfigError, PeerLostError, ZmqTrainError
from zmqtrain.fingerprint import changes_since, fingerprint_difference
from zmqtrain.hosting.actors import run_all
from zmqtrain.hosting.process import check_own_address, serve_health
from zmqtrain.models import LinearRegression
from zmqtrain.optim import SGD
from zmqtrain.planning.plan import plan_for
from zmqtrain.transport.memory import MemoryTransport

JOB = Job(model=LinearRegression(), data=NoisyLine(), optimizer=SGD(0.1))
MISTAKE, LOSS = ConfigError("a mistake"), PeerLostError("a loss")


class Stub(JobActor):
    """Runs until it is stopped, or fails at once; remembers what ended it."""

    def __init__(self, role: Role, failure: Exception | None = None, *, joined: bool = True):
        config = TaskConfig(role=role, job="job.py", ps=("127.0.0.1:2222",), workers=1)
        super().__init__(config, planned(JOB), MemoryTransport())
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


async def test_bug_in_an_actor_is_logged_if_another_one_fails_on_purpose(
    caplog: pytest.LogCaptureFixture,
) -> None:
    actors = [Stub(Role.PS, MISTAKE), Stub(Role.WORKER, ValueError("a bug"))]
    with pytest.raises(ConfigError, match="a mistake"):
        await run_all(actors)
    assert caplog.messages == ["worker 0 failed, too: a bug"]


async def test_checkpoint_of_another_number_of_workers_is_no_change() -> None:
    here = {"workers": "2", "policy": "test", "source": "111bba79e58f"}
    assert "workers: 3 there, 2 here" in fingerprint_difference(here | {"workers": "3"}, here)
    assert changes_since(here | {"workers": "3"}, here) == ""
    then = here | {"policy": "hogwild", "source": "50138ed1e192"}
    changes = changes_since(then, here)
    assert changes == "policy: hogwild then, test now; source: another than then"


FOREIGN = "203.0.113.1:2222"  # of no host: it is for documents
NAME = "zmqtrain.invalid:2222"  # perhaps that of a service in front of this host
MULTI, WITH_PS = "multi-worker-mirrored", "parameter-server"


def check(strategy: str, *workers: str, index: int = 0, bind: str | None = None) -> None:
    """Check where a worker listens, of a job whose parameters lie as the strategy says."""
    given: Any = {
        "worker_addresses": workers,
        "workers": len(workers),
        "index": index,
        "bind": bind,
    }
    config = TaskConfig(role=Role.WORKER, job="job.py", ps=("127.0.0.1:1",), **given)
    job = JOB.with_overrides(strategy=strategy)
    check_own_address(config, plan_for(job, config.cluster))


@pytest.mark.parametrize("index", [0, 1])
def test_worker_with_the_address_of_another_host_is_refused(index: int) -> None:
    workers = ["127.0.0.1:2222"]
    workers.insert(index, FOREIGN)
    with pytest.raises(ConfigError, match=rf"203.0.113.1:2222 for worker {index}, .*--index"):
        check(MULTI, *workers, index=index)


@pytest.mark.parametrize(
    ("strategy", "workers", "bind"),
    [
        (MULTI, ("127.0.0.1:2222", FOREIGN), None),
        (MULTI, ("[::1]:2222", FOREIGN), None),
        (MULTI, (NAME, FOREIGN), None),
        (MULTI, (FOREIGN,), "0.0.0.0"),
        (WITH_PS, (FOREIGN,), None),
    ],
)
def test_address_that_may_lead_here_or_is_not_needed_is_accepted(
    strategy: str, workers: tuple[str, ...], bind: str | None
) -> None:
    check(strategy, *workers, bind=bind)


def test_taken_metrics_port_ends_no_task_that_did_not_ask_for_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    chief = Stub(Role.CHIEF)
    config = TaskConfig(role=Role.CHIEF, job="job.py", ps=("127.0.0.1:2222",), workers=1)
    asked = config.model_copy(update={"metrics_port": config.metrics_address[1]})
    with contextlib.ExitStack() as stack:
        other = stack.enter_context(socket.socket())
        with contextlib.suppress(OSError):  # then yet another process has it
            other.bind(config.metrics_address)
            other.listen()
        with pytest.raises(ConfigError, match="is chief 0 already running on this host"):
            serve_health(chief, asked, stack)
        server = serve_health(chief, config, stack)
        assert chief.metrics_address == f"127.0.0.1:{server.port}"
        assert f"the metrics of chief 0 are at {chief.metrics_address}" in caplog.text
