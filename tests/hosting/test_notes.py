"""Notes of tasks on their host: the job that they serve, and how it has ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import zmqtrain
from tests.constants import Constants
from zmqtrain import Job
from zmqtrain.config import run_file
from zmqtrain.config.cluster import Role, Task
from zmqtrain.config.task import TaskConfig
from zmqtrain.data import NoisyLine
from zmqtrain.errors import ConfigError, ExitCode
from zmqtrain.hosting import notes
from zmqtrain.models import LinearRegression
from zmqtrain.optim import SGD
from zmqtrain.planning.plan import plan_for
from zmqtrain.wire.control import Shutdown

JOB = Job(model=LinearRegression(), data=NoisyLine(), optimizer=SGD())


def config_of(address: str) -> TaskConfig:
    return TaskConfig(role=Role.PS, job="job.py", ps=(address,))


def publish(name: str, address: str, stack: contextlib.ExitStack) -> None:
    role, index = name.split()
    config = config_of(address)
    plan = plan_for(JOB, config.cluster)
    notes.publish(Task(Role(role), int(index)), config, plan, stack, "")


@pytest.mark.parametrize(
    ("name", "address", "files"),
    [
        ("chief 0", "127.0.0.1:2222", 1),
        ("ps 0", "127.0.0.1:2222", 1),
        ("ps 1", "127.0.0.1:2222", 0),
        ("worker 0", "127.0.0.1:2222", 0),
        ("chief 0", "ipc:///tmp/ps-0.sock", 1),
        ("ps 0", "ipc:///tmp/ps-0.sock", 0),
    ],
)
def test_job_is_published_by_its_chief_and_its_ps_0(
    name: str, address: str, files: int, tempdir: Path
) -> None:
    with contextlib.ExitStack() as stack:
        publish(name, address, stack)
        assert len(list(tempdir.glob("*/*.json"))) == files


def test_ps_that_cannot_publish_the_job_serves_it_with_a_warning(
    tempdir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tempdir / f"zmqtrain-{os.getuid()}").touch()
    with contextlib.ExitStack() as stack:
        publish("ps 0", "127.0.0.1:2222", stack)
        assert "can find the job only by its chief" in caplog.text
        with pytest.raises(ConfigError):
            publish("chief 0", "127.0.0.1:2222", stack)


@pytest.mark.usefixtures("tempdir")
def test_host_of_a_ps_knows_of_the_end_of_its_job() -> None:
    config = config_of("127.0.0.1:2222")
    plan = plan_for(JOB, config.cluster)
    ps = Mock(end=None)
    notes.note_end([ps], plan)
    assert run_file.end_since(config.ps, 0.0) is None
    ps.end = Shutdown(ExitCode.DIVERGED, "too many gradients held NaN")
    notes.note_end([ps], plan)
    assert run_file.end_since(config.ps, 0.0) == ExitCode.DIVERGED


@pytest.mark.parametrize(
    ("given", "leaves"),
    [
        ({}, False),
        ({"on_term": "leave"}, True),
        ({"group": 2}, True),
        ({"group": 2, "members": (0,)}, False),  # its part may be asked for
    ],
)
async def test_late_worker_leaves_a_job_that_is_done_unless_another_may_begin(
    tmp_path: Path, constants: Constants, given: dict[str, Any], leaves: bool
) -> None:
    job = Job(model=LinearRegression(), data=NoisyLine(), optimizer=SGD(), steps=1)
    job = job.model_copy(update={"logdir": str(tmp_path)})
    await asyncio.to_thread(zmqtrain.run, job)
    constants(notes, CHECK_S=0.0)
    has_joined, codes = iter([False, True]), []

    class Late:
        @property
        def has_met(self) -> bool:
            return next(has_joined)

        def stop(self, code: int) -> None:
            codes.append(code)

    worker = Late()
    worker.job = job
    config = config_of("127.0.0.1:2222").of(Task(Role.WORKER, 0))
    config = config.model_copy(update={"on_term": given.pop("on_term", "end")})
    plan = replace(plan_for(job, config.cluster), **given)
    await notes.leave_with_the_job([worker], config, plan, None)
    assert codes == [ExitCode.OK] * leaves
