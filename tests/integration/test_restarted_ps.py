"""A ps that is killed and started again, with nothing of what it held."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.integration.conftest import Stage

STEPS = 200


@pytest.mark.parametrize(("ps", "policy"), [(1, "hogwild")])
def test_job_goes_back_to_its_last_checkpoint_and_ends(
    stage: Stage, check_counts: Callable[[Path], list[int]], ps: int, policy: str
) -> None:
    job = stage.job(
        "counting_job",
        gated=True,
        policy=policy,
        aggregate=1,
        examples=100,
        batch_size=7,
        steps=STEPS,
        partition_nbytes=64,
        logdir=str(stage.logdir),
        save_secs=0.3,
    )
    cluster = stage.cluster(job, ps=ps, workers=2)
    servers = [cluster.start("ps", index) for index in range(ps)]
    chief = cluster.start("chief")
    tasks = [chief, *(cluster.start("worker", index) for index in range(2))]
    chief.until_line("saved .*/step-0")

    servers[-1].signal(signal.SIGKILL)
    servers[-1] = cluster.start("ps", ps - 1)
    servers[-1].until_line("epoch 2 begins at version .*, from .*/step-")
    stage.open_gate()

    assert [task.exit_code() for task in [*tasks, *servers]] == [0] * (3 + ps), stage.report
    assert f"global step {STEPS}," in chief.output
    assert len(check_counts(stage.logdir / f"checkpoints/step-{STEPS:08d}")) == STEPS
