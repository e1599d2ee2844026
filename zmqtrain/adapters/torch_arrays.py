"""Arrays of NumPy or CuPy as tensors of torch, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


class _Writable:
    """A read-only array that torch accepts without a warning; nothing writes to it."""

    def __init__(self, array: NDArray[Any]) -> None:
        self._array = array  # keeps the memory
        address = array.__array_interface__["data"][0]
        self.__array_interface__ = array.__array_interface__ | {"data": (address, False)}


def tensor_over(array: Any) -> Any:
    """Return a tensor over the memory of an array of NumPy or CuPy."""
    if not isinstance(array, np.ndarray):
        return torch.from_dlpack(array)
    return torch.from_numpy(array if array.flags.writeable else np.asarray(_Writable(array)))


def variable_over(array: Any, like: Any) -> Any:
    """Return a tensor over the memory of a variable: complex as ``like``, if that is."""
    tensor = tensor_over(array)
    return torch.view_as_complex(tensor) if like.is_complex() else tensor


def variable_of(tensor: Any) -> NDArray[Any]:
    """Return a tensor as the array of a variable; complex numbers are pairs of floats."""
    tensor = tensor.detach()
    return array_of(torch.view_as_real(tensor) if tensor.is_complex() else tensor)


def array_of(tensor: Any) -> NDArray[Any]:
    """Return a tensor as an array of NumPy, which has no bfloat16."""
    tensor = tensor.detach().cpu()
    return np.asarray((tensor if has_numpy(tensor.dtype) else tensor.float()).numpy())


def has_numpy(dtype: Any) -> bool:
    """Return whether NumPy has this dtype; it has no bfloat16 and no floats of 8 bits."""
    numpys = (torch.float16, torch.float32, torch.float64)
    return not dtype.is_floating_point or dtype in numpys
