"""Trained weights, read from a logdir without a cluster."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from zmqtrain.errors import CheckpointError
from zmqtrain.store.checkpoint import checkpoints_directory, read_parameters
from zmqtrain.store.logdir import newest_valid

log = logging.getLogger(__name__)


def load(logdir: str | Path, *, average: bool = False) -> dict[str, NDArray[np.float32]]:
    """Return the variables of a job's newest valid checkpoint, by name, in the model's order.

    ``average``: their moving averages, if the job kept them (its field ``moving_average``).

    Raises:
        CheckpointError: there is no checkpoint, none is valid, or it holds no averages.
    """
    found = newest_valid(Path(logdir), lambda path, error: log.warning("%s: %s", path, error))
    if found is None:
        raise CheckpointError(
            f"{checkpoints_directory(Path(logdir))}: there is no checkpoint; expected the logdir "
            "of a job that has saved one"
        )
    return read_parameters(*found, average=average)
