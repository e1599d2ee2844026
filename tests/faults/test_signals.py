"""Tasks that are told to end while a step is under way, each as a process of its own."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.harness import Stage, check_counts
from zmqtrain.errors import ExitCode
from zmqtrain.protocol.status import Status

pytestmark = pytest.mark.integration


def has_left(status: Status) -> bool:
    return any(task.task == "worker 1" and task.state == "left" for task in status.tasks)


def test_stopped_worker_leaves_the_job_and_a_stopped_chief_saves_it(stage: Stage) -> None:
    job = stage.job("counting_job", gated=True, steps=10**6, logdir=str(stage.logdir))
    cluster = stage.cluster(job, workers=2)
    ps, chief, stays, leaves = (
        cluster.start(role, index, "--log-format", "json" if role == "chief" else "text")
        for role, index in (("ps", 0), ("chief", 0), ("worker", 0), ("worker", 1))
    )
    cluster.until_status(lambda s: len(s.tasks) == 4 and s.step > 4, "steps of both workers")

    leaves.signal(signal.SIGTERM)
    assert leaves.exit_code() == ExitCode.TERMINATED, str(leaves)
    assert leaves.lines("leaving after .* steps: stopped by a signal")
    step = cluster.until_status(has_left, "its farewell").step
    cluster.until_status(lambda s: s.step > step + 2, "steps without it")

    chief.signal(signal.SIGTERM)
    codes = [task.exit_code() for task in (chief, ps, stays)]
    assert codes == [ExitCode.TERMINATED] * 3, stage.report
    path = chief.json()["checkpoint"]  # its summary is one object, as each line of its log
    assert len(check_counts(Path(path))) == int(path.rpartition("-")[2]) > step
