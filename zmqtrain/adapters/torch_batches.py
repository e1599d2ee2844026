"""Batches of any kind for a module of PyTorch: as tensors, and as arguments."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from zmqtrain.adapters.torch_arrays import array_of, tensor_over
from zmqtrain.data.exact import rounded
from zmqtrain.models.base import Batch
from zmqtrain.models.trees import leaves, mapped


def tensors_of(batch: Batch, device: Any, *, is_double: bool) -> Any:
    """Return a batch with tensors on a device in place of its arrays, other objects as they are.

    Floats of 64 bits become float32, or with ``is_double`` all floats become float64.
    """
    return mapped(partial(_tensor, device=device, is_double=is_double), batch)


def on_host(batch: Any) -> Batch:
    """Return a batch with arrays of NumPy in place of its tensors."""
    return mapped(lambda leaf: array_of(leaf) if isinstance(leaf, torch.Tensor) else leaf, batch)


def rows_of(batch: Any) -> int:
    """Return the number of rows of a batch's first tensor; 1: it has no tensor with rows."""
    shapes = (leaf.shape for _, leaf in leaves(batch) if isinstance(leaf, torch.Tensor))
    return next((shape[0] for shape in shapes if shape), 1)


def outputs_of(module: Any, batch: Any, *, is_whole: bool) -> Any:
    """Return the output of a module for a batch.

    ``is_whole``: it gets all of it, as it computes the loss, too. Otherwise it gets the first part
    of a tuple, and of a dict those that it takes.
    """
    if isinstance(batch, Mapping):
        names = batch if is_whole else _taken(module.forward, batch)
        return module(**{name: batch[name] for name in names})
    if isinstance(batch, tuple):
        return module(*(batch if is_whole else batch[:1]))
    return module(batch)


def targets_of(batch: Any) -> tuple[Any, ...]:
    """Return a loss's arguments behind the outputs: a tuple's other parts, or the whole batch."""
    return batch[1:] if isinstance(batch, tuple) else (batch,)


def _tensor(leaf: Any, *, device: Any, is_double: bool) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float64 and leaf.device.type == "cpu":
        leaf = leaf.detach().numpy()
    if not isinstance(leaf, torch.Tensor):
        if getattr(getattr(leaf, "dtype", None), "kind", "O") not in "biufc":
            return leaf
        leaf = tensor_over(leaf if is_double else _single(leaf))
    leaf = leaf.to(device)
    if is_double:
        return leaf.double() if leaf.is_floating_point() else leaf
    return leaf.float() if leaf.dtype == torch.float64 else leaf


def _single(array: Any) -> Any:
    """Return float64 of NumPy as float32; others as they are."""
    is_double = isinstance(array, np.ndarray) and array.dtype == np.float64
    return rounded(array, "a batch") if is_double else array


def _taken(function: Any, names: Mapping[str, Any]) -> list[str]:
    """Return the names that a function takes."""
    taken = inspect.signature(function).parameters
    takes_all = any(one.kind is one.VAR_KEYWORD for one in taken.values())
    return [name for name in names if takes_all or name in taken]
