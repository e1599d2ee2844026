"""A checkpoint of version 0.1 is read: its parameters, its slots, and a run that goes on from it.

``data/logdir-0.1`` was written by commit 96a45be (2 ps, 2 workers, Adam, 8 steps of 10 examples).
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from zmqtrain import Job, run
from zmqtrain.data import NoisyLine
from zmqtrain.models import LinearRegression
from zmqtrain.observe.summary import parameters_sha256
from zmqtrain.optim import Adam
from zmqtrain.store.checkpoint import read_parameters
from zmqtrain.store.manifest import read_manifest, verify

CHECKPOINT = Path(__file__).parent / "data/logdir-0.1/checkpoints/step-00000008"
SHA256 = "447b1788f8631af6e7c547f77b384c25454d7bb84beaf5dd9d2ae2c2347d8735"


@pytest.fixture
def job(tmp_path: Path) -> Job:
    shutil.copytree(CHECKPOINT.parent, tmp_path / "checkpoints")
    return Job(
        model=LinearRegression(),
        data=NoisyLine(examples=200),
        optimizer=Adam(0.05),
        batch_size=10,
        policy="hogwild",
        steps=12,
        logdir=str(tmp_path),
    )


def test_old_checkpoint_holds_what_its_chief_read() -> None:
    manifest = read_manifest(CHECKPOINT)
    verify(CHECKPOINT, manifest)
    assert (manifest.generation, manifest.global_step) == (1, 8)
    assert parameters_sha256(read_parameters(CHECKPOINT, manifest)) == SHA256


@pytest.mark.parametrize(("ps", "workers"), [(0, 1), (1, 2), (2, 2)])
def test_run_goes_on_from_an_old_checkpoint(ps: int, workers: int, job: Job) -> None:
    summary = run(job, **({"ps": ps} if ps else {}), workers=workers)
    assert (summary.global_step, summary.examples) == (12, 120)
    assert summary.pushes["applied"] == 4
