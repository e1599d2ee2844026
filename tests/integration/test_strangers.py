"""Jobs without keys on loopback: other users of the host can neither steer nor feed them."""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name

import pytest

from tests.harness import Stage, status_of
from tests.rights import as_nobody, needs_another_user
from zmqtrain.actors.client import ask
from zmqtrain.config.cluster import Role
from zmqtrain.config.task import TaskConfig
from zmqtrain.data.synthetic import NoisyLine
from zmqtrain.errors import ExitCode
from zmqtrain.job import Job
from zmqtrain.models import LinearRegression
from zmqtrain.optim import SGD
from zmqtrain.planning.exchanges import EXCHANGES
from zmqtrain.roles.launch import run_task
from zmqtrain.wire.control import GetStatus, RequestSave, RequestStop, SwitchPolicy
from zmqtrain.wire.messages import Message

pytestmark = [pytest.mark.integration, needs_another_user]


def asked(address: str, message: Message) -> str:
    return f"{ask(address, message, timeout_s=5.0)}"


# What a worker imports when it needs it, another user may not be able to read.
NoisyLine().load(None)
for kind in EXCHANGES.values():
    resolve_name(kind.made_by)


def joined(address: str) -> str:
    """Run a worker; return its exit code."""
    config = TaskConfig(
        role=Role.WORKER, job="strange", ps=(address,), workers=2, index=1, metrics_port=0
    )
    job = Job(model=LinearRegression(), data=NoisyLine(), optimizer=SGD(0.1), steps=5, batch_size=4)
    code = run_task(config, job)
    return str(int(code))


def test_other_user_cannot_steer_feed_or_watch_a_job_and_its_own_user_can(stage: Stage) -> None:
    cluster = stage.cluster(stage.job(gated=True), workers=2)
    tasks = [cluster.start(role) for role in ("ps", "chief", "worker")]
    stage.until_status(cluster.leader, lambda status: status.step > 0, "the first step")
    attempts: dict[str, Callable[[], str]] = {
        type(message).__name__: lambda message=message: asked(cluster.leader, message)
        for message in (GetStatus(), SwitchPolicy("hogwild"), RequestSave(), RequestStop())
    }
    for name, attempt in attempts.items():
        told = as_nobody(attempt)
        assert told.startswith(f"NotAdmittedError: ps 0 at tcp://{cluster.leader}: it "), name
        assert "belongs to user 0, and this task to user 65534" in told
    assert as_nobody(lambda: joined(cluster.leader)) == str(int(ExitCode.REFUSED))
    tasks[0].until_line("WARNING .*refused: user 65534 of this host connected")
    status = status_of(cluster.leader)
    assert status is not None
    assert not any(task.task == "worker 1" for task in status.tasks)
    tasks.append(cluster.start("worker", 1))
    tasks[0].until_line("worker 1 joined")
    stage.open_gate()
    assert [task.exit_code() for task in tasks] == [0] * 4, stage.report
