"""Trained weights for a module of PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from zmqtrain.adapters.common import weights_of
from zmqtrain.adapters.torch_tables_of import weights_in
from zmqtrain.errors import ConfigError
from zmqtrain.models.rows import TableReader


def load_state_dict(
    module: Any, weights: str | Path | Mapping[str, NDArray[Any]], *, average: bool = False
) -> None:
    """Load trained weights into a module: those of a logdir, or the result of `zmqtrain.load`.

    ``average``: the moving averages of a logdir.

    Raises:
        ConfigError: names or shapes are not those of the module.
        CheckpointError: the logdir has no checkpoint.
    """
    values = weights_of(weights, average=average)
    tables = weights_in(module)
    tensors = {}
    for name, value in values.items():
        is_table = isinstance(value, TableReader)
        if is_table and name in tables:
            tables[name].bind(value, None, torch.device("cpu"), torch.float32)
        else:
            tensors[name] = torch.from_numpy(np.array(value.whole() if is_table else value))
    first: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        shared = first.setdefault(id(parameter), name)  # a checkpoint has tied ones once
        if shared in tensors:
            tensors.setdefault(name, tensors[shared])
    try:
        for name, own in module.state_dict().items():
            if name in tensors and own.is_complex() and not tensors[name].is_complex():
                tensors[name] = torch.view_as_complex(tensors[name])
        module.load_state_dict(tensors)
    except RuntimeError as error:
        raise ConfigError(
            f"the weights do not fit the module: {error}; expected those of this module: leave out "
            "the others, by {name: weights[name] for name in module.state_dict()}"
        ) from None
