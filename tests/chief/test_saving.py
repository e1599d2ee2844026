"""The chief's checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

import zmqtrain
from zmqtrain.chief.saving import Saver
from zmqtrain.data import NoisyLine
from zmqtrain.errors import CheckpointError
from zmqtrain.models import LinearRegression
from zmqtrain.observe.metrics import Metrics
from zmqtrain.optim import SGD
from zmqtrain.wire.messages import Saved


async def test_failed_save_leaves_no_directory(tmp_path: Path) -> None:
    directories = []

    async def fail(directory: Path) -> Saved:
        (directory / "shard-00000.safetensors").touch()
        directories.append(directory)
        raise CheckpointError("no room")

    job = zmqtrain.Job(
        model=LinearRegression(), data=NoisyLine(), optimizer=SGD(), logdir=str(tmp_path)
    )
    saver = Saver(job, 1, job.fingerprint(1), Metrics("chief"), fail)
    with pytest.raises(CheckpointError, match="no room"):
        await saver.save(step=10, generation=1)
    (directory,) = directories
    assert not directory.exists()
