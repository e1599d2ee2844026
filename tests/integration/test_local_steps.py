"""Local steps in processes: what a kill costs, and what is seen of a round."""

from __future__ import annotations

import os
import signal

from tests.harness import Stage
from zmqtrain.protocol.status import Status
from zmqtrain.store.manifest import read_manifest

STEPS, BATCH = 60, 50


def test_killed_worker_costs_its_unfinished_round_and_nothing_else(stage: Stage) -> None:
    job = stage.job(
        "digits_job", gated=True, policy="local-steps:5", steps=STEPS, compression="int8",
        logdir=str(stage.logdir),
    )  # fmt: skip
    run = stage.train(job, "--ps", 2, "--workers", 2, "--lane", "tcp")
    address = stage.run_address()

    def is_within_a_round(status: Status) -> bool:
        workers = [task for task in status.tasks if task.role == "worker"]
        return status.rounds > 1 and any(task.progress.local_step > 0 for task in workers)

    before = stage.until_status(address, is_within_a_round, "a step of the third round")
    assert 0 < before.agreement <= 1.001
    assert before.nbytes_per_batch > 0
    killed = next(task.process for task in before.tasks if task.task == "worker 1")
    os.kill(int(killed.rpartition(":")[2]), signal.SIGKILL)
    stage.open_gate()
    summary = run.summary()
    assert summary["global_step"] == STEPS
    ledger = read_manifest(stage.logdir / f"checkpoints/step-{STEPS:08d}").ledger
    counted = ledger.counted()
    assert ledger.examples == summary["examples"] == len(counted) * BATCH
    # Every round has the results of both workers, except those that ended without the killed one.
    assert len(counted) > STEPS
    assert len(counted) % 5 == 0
    assert summary["pushes"]["refused"] == summary["pushes"]["dropped"] == 0
    leased_again = set(range(max(counted) + 1)) - set(counted)
    assert len(leased_again) <= 5  # of the last round, which another worker had
