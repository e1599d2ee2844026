"""A worker that dies without a word."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from zmqtrain.store.manifest import read_manifest

if TYPE_CHECKING:
    from tests.harness import Stage
    from zmqtrain.wire.messages import Status, TaskStatus

STEPS = 300
GRADIENTS = 4  # averaged in a step


def worker_1(status: Status) -> TaskStatus:
    return next(task for task in status.tasks if task.task == "worker 1")


def test_killed_worker_is_done_without_and_may_return_and_no_example_is_lost(
    stage: Stage, check_counts: Callable[[Path], list[int]]
) -> None:
    job = stage.job(
        "counting_job",
        gated=True,
        policy=f"sync-replicas:aggregate={GRADIENTS}",
        aggregate=GRADIENTS,
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
    # Each live worker held two at the end.
    assert len(manifest.ledger["open_batches"]) <= 4
    assert len(check_counts(checkpoint)) == STEPS * GRADIENTS
