"""`zmqtrain run` from its start to its summary."""

from __future__ import annotations

import math
from typing import Any

from threadpoolctl import threadpool_limits

import zmqtrain
from tests.harness import Stage
from zmqtrain.config.job_file import load_job

BATCH = 50


def check(summary: dict[str, Any], policy: str, ps: int, steps: int, gradients: int) -> None:
    """Check a summary of two workers; an update of ``policy`` is the mean of ``gradients``."""
    assert (summary["policy"], summary["ps"], summary["workers"]) == (policy, ps, 2)
    assert (summary["ended"], summary["exit_code"]) == (f"step {steps} of {steps} is done", 0)
    assert summary["global_step"] == steps
    assert summary["accuracy"] >= 0.95
    assert 0 < summary["loss"] < 0.5
    assert math.isclose(summary["steps_per_second"] * summary["seconds"], steps, rel_tol=0.02)
    assert summary["staleness"].keys() == {"mean", "p50", "p99", "max"}
    pushes = summary["pushes"]
    assert pushes["applied"] == steps * gradients
    assert pushes["duplicate"] == pushes["refused"] == 0
    assert summary["examples"] == pushes["applied"] * BATCH
    assert len(summary["parameters_sha256"]) == 64


def test_sync_replicas_gives_the_same_parameters_however_it_is_run(stage: Stage) -> None:
    job = stage.job(policy="sync-replicas", steps=200)
    with threadpool_limits(1):
        digests = {zmqtrain.run(load_job(job), workers=2).parameters_sha256}
    summary = stage.train(job, "--ps", 2).summary()
    check(summary, "sync-replicas", 2, 200, 2)
    assert summary["staleness"]["max"] == summary["pushes"]["dropped"] == 0
    assert {summary["parameters_sha256"]} == digests
