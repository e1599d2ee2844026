"""Workers that die without a word, under each policy."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from zmqtrain.store.manifest import read_manifest

if TYPE_CHECKING:
    from tests.harness import Stage
    from zmqtrain.wire.messages import Status, TaskStatus

STEPS = 300


def worker_1(status: Status) -> TaskStatus:
    return next(task for task in status.tasks if task.task == "worker 1")


@pytest.mark.parametrize(
    ("policy", "gradients"),
    [
        ("bounded-staleness:2", 1),
        ("sync-replicas", None),  # of one worker or two
        ("sync-replicas:aggregate=4", 4),
    ],
)
def test_killed_worker_is_done_without_and_may_return_and_no_example_is_lost(
    stage: Stage, check_counts: Callable[[Path], list[int]], policy: str, gradients: int | None
) -> None:
    job = stage.job(
        "counting_job",
        gated=True,
        policy=policy,
        aggregate=gradients or 1,
        steps=STEPS,
        logdir=str(stage.logdir),
    )
    cluster = stage.cluster(job, workers=2)
    tasks = [cluster.start("ps"), cluster.start("chief"), cluster.start("worker", 0)]
    victim = cluster.start("worker", 1)
    cluster.until_status(lambda s: s.step > 2 and worker_1(s).step > 2, "steps of worker 1")

    victim.signal(signal.SIGKILL)
    status = cluster.until_status(lambda s: worker_1(s).state == "left", "its lease to expire")
    cluster.until_status(lambda s: s.step > status.step + 2, "progress without worker 1")
    tasks.append(cluster.start("worker", 1))
    cluster.until_status(
        lambda s: worker_1(s).state != "left" and worker_1(s).step > 2, "steps of its next life"
    )
    stage.open_gate()

    assert [task.exit_code() for task in tasks] == [0] * 4, stage.report
    assert f"global step {STEPS}," in tasks[1].output
    checkpoint = stage.logdir / f"checkpoints/step-{STEPS:08d}"
    manifest = read_manifest(checkpoint)
    assert set(manifest.worker_marks) == {"worker 0", "worker 1"}
    open_batches = manifest.ledger["open_batches"]
    if "sync-replicas" in policy:
        assert len(open_batches) <= 4  # the two that each live worker held at the end
    else:
        assert open_batches == []
    if gradients is not None:
        assert len(check_counts(checkpoint)) == STEPS * gradients
