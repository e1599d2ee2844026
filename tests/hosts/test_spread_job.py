"""A job with keys whose tasks are on different hosts, as it is when nothing is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.harness import Stage
    from tests.hosts.conftest import SpreadJob


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
