from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import zmqtrain
from zmqtrain.errors import CheckpointError


@pytest.mark.parametrize(("average", "key"), [(False, "parameters"), (True, "average")])
def test_weights_are_those_of_the_newest_checkpoint(
    job, tmp_path: Path, average: bool, key: str
) -> None:
    job.save(tmp_path, 10)
    job.state[key] = {name: value + 1 for name, value in job.state[key].items()}
    job.save(tmp_path, 20)
    weights = zmqtrain.load(str(tmp_path), average=average)
    assert list(weights) == [variable.name for variable in job.variables]
    for name, value in weights.items():
        np.testing.assert_array_equal(value, job.state[key][name])


def test_logdir_without_a_checkpoint_has_no_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        zmqtrain.load(tmp_path)


def test_averages_that_the_job_did_not_keep_are_refused(job, tmp_path: Path) -> None:
    del job.state["average"]
    job.save(tmp_path, 10)
    with pytest.raises(CheckpointError, match="average"):
        zmqtrain.load(tmp_path, average=True)
