"""Trained weights: read from a logdir without a cluster, written into one file."""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save as safetensors

from zmqtrain.errors import CheckpointError, ConfigError
from zmqtrain.store.checkpoint import checkpoints_directory, read_parameters
from zmqtrain.store.durable import replace_file, writing
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


def save(path: str | Path, weights: Mapping[str, Any], *, overwrite: bool = True) -> None:
    """Write arrays by name into one file, ``.safetensors`` or ``.npz``; directories are made.

    Raises:
        ConfigError: the path has another ending.
        CheckpointError: it cannot be written, or exists and ``overwrite`` is False.
    """
    path = Path(path)
    arrays = {name: np.ascontiguousarray(value) for name, value in weights.items()}
    if path.suffix == ".safetensors":
        content = safetensors(arrays)
    elif path.suffix == ".npz":
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)  # type: ignore[arg-type]
        content = buffer.getvalue()
    else:
        raise ConfigError(
            f"weights cannot be written to {str(path)!r}; expected a path that ends with "
            ".safetensors or .npz"
        )
    if path.exists() and not overwrite:
        raise CheckpointError(f"{path} exists already; delete it, or write to another path")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)
