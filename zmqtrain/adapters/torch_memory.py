"""Tensors of torch over the worker's memory, for the adapters of torch and of Keras on it."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from zmqtrain.compute.threads import thread_limit
from zmqtrain.errors import ConfigError
from zmqtrain.models.base import Buffers, Gradients, written

log = logging.getLogger(__name__)


def use_own_threads() -> None:
    """Have torch use the threads of this task; OpenMP has a number for each calling thread."""
    threads = thread_limit()
    if threads is not None and threads != torch.get_num_threads():
        torch.set_num_threads(threads)


class GradientViews:
    """Gradients of parameters, which ``backward()`` adds up in the worker's memory."""

    def __init__(self, owner: object, out: Gradients, unused: set[str]) -> None:
        """``owner``: the model, for texts. ``unused``: names that have been reported."""
        self._owner, self._out, self._unused = owner, out, unused
        self._trained: list[tuple[str, Any, Any]] = []  # (name, parameter, view of its gradient)
        self._hooks: list[Any] = []
        self.is_last_part = True  # whether backward() completes the gradients

    def add(self, name: str, parameter: Any) -> None:
        """Keep the gradient of a parameter in ``out``."""
        view = tensor_over(self._out[name])
        self._trained.append((name, parameter, view))
        if isinstance(self._out, Buffers):  # it wants to know when a gradient is complete

            def on_accumulated(parameter: Any) -> None:
                if self.is_last_part:
                    if parameter.grad is not view:
                        self._take_in(name, parameter, view)
                    written(self._out, name)

            self._hooks.append(parameter.register_post_accumulate_grad_hook(on_accumulated))

    def close(self) -> None:
        """Release the parameters."""
        for hook in self._hooks:
            hook.remove()
        for _, parameter, _ in self._trained:
            parameter.grad = None

    def clear(self) -> None:
        """Make all gradients 0 before a step."""
        torch._foreach_zero_([view for _, _, view in self._trained])

    def complete(self) -> None:
        """Take in what ``backward()`` has left elsewhere.

        Raises:
            ConfigError: a gradient is sparse.
        """
        for name, parameter, view in self._trained:
            if parameter.grad is not view:
                self._take_in(name, parameter, view)

    def _take_in(self, name: str, parameter: Any, view: Any) -> None:
        """Copy a gradient that is not in the worker's memory there; the next one is made there."""
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            view.zero_()
            if name not in self._unused:
                self._unused.add(name)
                log.warning(
                    "parameter %s of %r has no gradient: it counts as zero", name, self._owner
                )
        elif gradient.layout is not torch.strided:
            raise ConfigError(
                f"the gradient of {name!r} of {self._owner!r} is sparse; expected a dense one: "
                "build the module with sparse=False"
            )
        else:
            view.copy_(gradient)
        parameter.grad = view


class _Writable:
    """A read-only array as torch takes it without a warning; nothing writes to it all the same."""

    def __init__(self, array: NDArray[Any]) -> None:
        self._array = array  # keeps the memory
        address = array.__array_interface__["data"][0]
        self.__array_interface__ = array.__array_interface__ | {"data": (address, False)}


def tensor_over(array: Any) -> Any:
    """Return a tensor over the memory of an array of NumPy or CuPy."""
    if not isinstance(array, np.ndarray):
        return torch.from_dlpack(array)
    return torch.from_numpy(array if array.flags.writeable else np.asarray(_Writable(array)))


def array_of(tensor: Any) -> NDArray[Any]:
    """Return a tensor as an array of NumPy, which has no bfloat16."""
    tensor = tensor.detach().cpu()
    return np.asarray((tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy())
