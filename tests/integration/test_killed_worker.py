"""Workers that die without a word, under each policy."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from zmqtrain.coordination.ledger import LedgerState
from zmqtrain.data.batches import BatchPlan
from zmqtrain.store.checkpoint import read_parameters
from zmqtrain.store.manifest import read_manifest

if TYPE_CHECKING:
    from tests.integration.conftest import Stage
    from zmqtrain.wire.messages import Status, TaskStatus

STEPS = 300
EXAMPLES = 100
BATCH = 7


def worker_1(status: Status) -> TaskStatus:
    return next(task for task in status.tasks if task.task == "worker 1")


def check_examples(checkpoint: Path, gradients: int | None) -> None:
    """Check that what was counted is every example of each finished pass once.

    The parameters count examples if an update is made of ``gradients`` gradients, always as many.
    """
    manifest = read_manifest(checkpoint)
    assert manifest.global_step == STEPS
    ledger = LedgerState.model_validate(manifest.ledger)
    counted = sorted(set(range(ledger.next_batch)) - set(ledger.open_batches))
    assert ledger.examples == len(counted) * BATCH
    assert len(ledger.open_batches) <= 4  # two that each live worker holds at the end
    if "sync" not in manifest.policy:
        assert not ledger.open_batches
    if gradients is not None:
        assert len(counted) == STEPS * gradients
        plan = BatchPlan(EXAMPLES, BATCH, seed=0)
        expected = np.bincount(np.concatenate([plan.indices(batch) for batch in counted]))
        counts = read_parameters(checkpoint, manifest)["counts"]
        np.testing.assert_array_equal(counts, expected)


@pytest.mark.parametrize(
    ("policy", "gradients"),
    [
        ("hogwild", 1),
        ("bounded-staleness:2", 1),
        ("sync-replicas", None),
        ("sync-replicas:aggregate=1", 1),
        ("sync-replicas:aggregate=4", 4),
    ],
)
def test_killed_worker_is_done_without_and_may_return_and_no_example_is_lost(
    stage: Stage, policy: str, gradients: int | None
) -> None:
    job = stage.job(
        "counting_job",
        gated=True,
        policy=policy,
        aggregate=gradients or 1,
        examples=EXAMPLES,
        batch_size=BATCH,
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
    check_examples(stage.logdir / f"checkpoints/step-{STEPS:08d}", gradients)


def test_run_goes_on_when_a_worker_of_it_is_killed(stage: Stage) -> None:
    run = stage.train(stage.job(gated=True), "--heartbeat-s", 0.2, "--lease-s", 1)
    status = stage.until_status(stage.run_address(), lambda s: s.step > 0, "the first steps")
    os.kill(int(worker_1(status).process.rpartition(":")[2]), signal.SIGKILL)
    run.until_line("worker 1 was killed by signal 9: .*training goes on with 1 workers")
    stage.open_gate()
    assert run.summary()["global_step"] == 300
