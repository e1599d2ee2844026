"""A job on a stream, one of whose workers is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np

from tests.harness import Stage, check_counts

STEPS, SIZE = 200, 7
LENGTHS = (40, 11, 29, 20)
JOB = """
from zmqtrain.data import Stream

lengths = {lengths}

def read(part):
    begin = sum(lengths[:part])
    return iter(range(begin, begin + lengths[part]))

job = job.model_copy(update={{"data": Arrays(Stream(range(4), read), (np.arange(3),))}})
"""


def examples_of(number: int) -> np.ndarray:
    turn, part = divmod(number, len(LENGTHS))
    places = np.arange(turn * SIZE, (turn + 1) * SIZE) % LENGTHS[part]
    return sum(LENGTHS[:part]) + places


def test_each_batch_counts_once_when_a_worker_is_killed(stage: Stage) -> None:
    job = Path(
        stage.job(
            "counting_job", gated=True, examples=sum(LENGTHS), batch_size=SIZE, steps=STEPS,
            policy="sync-replicas:aggregate=2", aggregate=2, logdir=str(stage.logdir),
        )
    )  # fmt: skip
    job.write_text(job.read_text() + JOB.format(lengths=LENGTHS))
    run = stage.train(job, "--workers", 2)
    address = stage.run_address()

    def life(status: object) -> str:
        return next(task.process for task in status.tasks if task.task == "worker 1")

    before = stage.until_status(address, lambda s: s.step > 4 and life(s), "the first steps")
    os.kill(int(life(before).rpartition(":")[2]), signal.SIGKILL)
    stage.until_status(
        address, lambda s: life(s) != life(before) and s.step > before.step + 4, "its next life"
    )
    stage.open_gate()
    assert run.summary()["global_step"] == STEPS
    counted = check_counts(stage.logdir / f"checkpoints/step-{STEPS:08d}", examples_of)
    assert len(counted) == 2 * STEPS
