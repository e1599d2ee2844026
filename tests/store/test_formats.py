"""Checkpoints that earlier versions wrote are read, and trained on.

Those in formats/ have been written by commits of this repository, as 2 ps and 2 workers trained
JOB: before the manifest had marks of workers (4c2e1ed1), while it called a generation an epoch
(56750d9a), and by the last commit of each format. That of version 0.1 (96a45be) is of another job.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import zmqtrain
from zmqtrain import Job
from zmqtrain.data import Digits, NoisyLine
from zmqtrain.models import MLP, LinearRegression
from zmqtrain.observe.summary import parameters_sha256
from zmqtrain.optim import Adam
from zmqtrain.store.logdir import checkpoints
from zmqtrain.store.manifest import FORMAT, read_manifest

FORMATS = sorted(path for path in Path(__file__).with_name("formats").iterdir())
NEWEST = Path(__file__).with_name("formats") / str(FORMAT)
STEP = 40
VERSION_0_1 = Path(__file__).with_name("data") / "logdir-0.1"
SHA256 = "447b1788f8631af6e7c547f77b384c25454d7bb84beaf5dd9d2ae2c2347d8735"
"""Of its parameters, as the chief that wrote them noted."""


def job(logdir: Path, steps: int) -> Job:
    return Job(
        model=MLP(64, 3, 10),
        data=Digits(),
        optimizer=Adam(0.01),
        policy="sync-replicas",
        batch_size=20,
        steps=steps,
        logdir=str(logdir),
    )


def test_every_format_has_a_checkpoint() -> None:
    assert {int(path.name[0]) for path in FORMATS} == set(range(1, FORMAT + 1))


@pytest.mark.parametrize("logdir", FORMATS, ids=lambda path: path.name)
def test_job_goes_on_from_an_earlier_format_as_from_the_newest(
    logdir: Path, tmp_path: Path
) -> None:
    ends = []
    (checkpoint,) = checkpoints(logdir)
    assert read_manifest(checkpoint).format == int(logdir.name[0])
    weights, newest = zmqtrain.load(logdir), zmqtrain.load(NEWEST)
    assert list(weights) == list(newest)
    assert all(np.array_equal(weights[name], newest[name]) for name in newest)
    for each in (logdir, NEWEST):
        copy = tmp_path / each.name
        if not copy.exists():
            shutil.copytree(each, copy)
        summary = zmqtrain.run(job(copy, STEP + 5))
        assert summary.global_step == STEP + 5
        ends.append(summary.parameters_sha256)
        shutil.rmtree(copy)
    assert ends[0] == ends[1]


def test_checkpoint_of_version_0_1_is_read_and_trained_on(tmp_path: Path) -> None:
    assert parameters_sha256(zmqtrain.load(VERSION_0_1)) == SHA256
    shutil.copytree(VERSION_0_1, tmp_path, dirs_exist_ok=True)
    fields = {"model": LinearRegression(), "data": NoisyLine(examples=200), "batch_size": 10}
    old = Job(optimizer=Adam(0.05), policy="hogwild", steps=12, logdir=str(tmp_path), **fields)
    summary = zmqtrain.run(old, workers=2, ps=1)
    assert (summary.global_step, summary.examples, summary.pushes["applied"]) == (12, 120, 4)
