"""A job with keys whose tasks are on different hosts, as it is when nothing is wrong."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable

import pytest

from tests.harness import Process, Stage, status_of
from tests.hosts.conftest import Hosts, SpreadJob
from zmqtrain.protocol.status import Status
from zmqtrain.transport.security import Security

pytestmark = pytest.mark.integration


def test_job_over_three_hosts_trains_to_its_end_over_tcp(
    stage: Stage, spread: Callable[..., SpreadJob]
) -> None:
    job = spread(stage.job(gated=True))
    job.start_all()
    job.until_steps()
    told = job.start_on(0, "status", *job.status_command()).summary()
    lanes = [task["lanes"] for task in told["tasks"] if task["role"] == "worker"]
    assert lanes == ["tcp", "tcp"]
    for index in range(2):
        reason = job.tasks[f"worker {index}"].until_line("tensors travel to ps 0 by tcp: ")
        assert "No such file or directory" in reason
    job.end()
    assert "global step 300," in job.tasks["chief 0"].output


@pytest.mark.hosts
def test_job_without_ps_over_three_hosts_goes_on_after_a_worker_was_killed(
    stage: Stage, hosts: Hosts
) -> None:
    addresses = [f"{hosts.address(index)}:2222" for index in range(3)]
    job = stage.job(gated=True)

    def start(index: int) -> Process:
        task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        segments = stage.directory / f"segments-{index}"
        command = hosts.command(
            index,
            *(sys.executable, "-m", "zmqtrain.roles.worker", "--job", job, "--insecure"),
            *("--segment-dir", str(segments), "--lane", "tcp"),  # the directory is seen by all
            *("--metrics-port", "0", "--threads", "1"),
        )
        return stage.start(f"worker {index}", *command, env={"TF_CONFIG": json.dumps(task)})

    def status() -> Status | None:
        return hosts.inside(0, lambda: status_of(addresses[0], Security(insecure=True)))

    tasks = [start(index) for index in range(3)]
    before = stage.until_told(status, lambda s: s.step > 2, "the first steps")
    tasks[2].signal(signal.SIGKILL)
    tasks[2].exit_code()
    step = max(before.step, getattr(status(), "step", 0))
    tasks[2] = start(2)
    stage.until_told(status, lambda s: s.step > step + 3, "steps of the next life")
    stage.open_gate()
    assert [task.exit_code() for task in tasks] == [0, 0, 0], stage.report
    assert "policy sync-replicas, 3 workers without ps\nglobal step 300," in tasks[0].output
