"""A task that dies without a word: whoever cannot go on ends in time, and says who is missing."""

from __future__ import annotations

import signal
from typing import Any

import psutil
import pytest

from zmqtrain.errors import ExitCode

pytestmark = pytest.mark.integration

PATIENCE = ("--peer-timeout-s", "1.5", "--join-timeout-s", "6")


def test_killed_ps_ends_the_worker_and_the_chief_that_need_it(stage: Any) -> None:
    cluster = stage.cluster(stage.job(gated=True), ps=2)
    lead, second = (cluster.start("ps", index, *PATIENCE) for index in range(2))
    others = [cluster.start(role, 0, *PATIENCE) for role in ("worker", "chief")]
    cluster.until_status(lambda status: status.step > 0, "the first step")
    second.signal(signal.SIGKILL)
    for task in others:
        assert task.exit_code() == ExitCode.PEER_LOST, str(task)
        assert task.lines("ERROR ps 1 .*silent for"), str(task)
        assert "Traceback" not in task.log
    assert lead.exit_code() == ExitCode.ORPHANED, str(lead)
    assert lead.lines("ERROR the chief has been silent for [67] s and ended no run"), str(lead)


def started_by(run: Any, role: str) -> psutil.Process:
    """Return the task of this role that a ``zmqtrain run`` has started."""
    tasks = psutil.Process(run.pid).children()
    (found,) = (task for task in tasks if f"zmqtrain.roles.{role}" in task.cmdline())
    return found


@pytest.mark.parametrize("role", ["ps", "worker"])
def test_run_ends_when_a_task_is_killed_that_it_cannot_do_without(stage: Any, role: str) -> None:
    run = stage.train(stage.job(gated=True), "--workers", 1, "--logdir", stage.logdir)
    stage.until_status(stage.run_address(), lambda status: status.step > 0, "the first step")
    started_by(run, role).send_signal(signal.SIGKILL)
    assert run.exit_code() == ExitCode.PEER_LOST, str(run)
    assert f"error: {role} 0 was killed by signal 9" in run.log
    assert "Traceback" not in run.log


def test_run_goes_on_when_one_of_its_workers_is_told_to_leave(stage: Any) -> None:
    run = stage.train(stage.job(gated=True), "--workers", 2)
    stage.until_status(stage.run_address(), lambda status: status.step > 0, "the first step")
    workers = [
        task
        for task in psutil.Process(run.pid).children()
        if "zmqtrain.roles.worker" in task.cmdline()
    ]
    workers[0].terminate()
    run.until_line("training goes on with 1 workers")
    stage.open_gate()
    assert run.summary()["global_step"] == 300
