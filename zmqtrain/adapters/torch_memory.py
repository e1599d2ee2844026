"""Tensors of torch over the worker's memory, for the adapters of torch and of Keras on it."""

from __future__ import annotations

import logging
import operator
import zlib
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from zmqtrain.compute.threads import thread_limit
from zmqtrain.errors import ConfigError
from zmqtrain.models.base import Buffers, Gradients, Parameters, written

log = logging.getLogger(__name__)


def use_own_threads() -> None:
    """Have torch use the threads of this task; OpenMP has a number for each calling thread."""
    threads = thread_limit()
    if threads is not None and threads != torch.get_num_threads():
        torch.set_num_threads(threads)


def seed_torch(seed: int, batch: int) -> None:
    """Seed torch's own generator for a batch."""
    torch.manual_seed(zlib.crc32(f"{seed} {batch}".encode()))


class BoundVariables:
    """Variables of a model in the worker's memory: parameters, their gradients, and state.

    ``backward()`` adds the gradients up there.
    """

    def __init__(self, owner: object) -> None:
        """``owner``: the model, for texts."""
        self._owner = owner
        self._values: Parameters = {}
        self._out: Gradients | None = None  # None in an evaluation
        self._arrays: list[Any] = []  # of both
        self._trained: list[tuple[str, Any, Any]] = []  # (name, parameter, view of its gradient)
        self._state: list[_State] = []
        self._hooks: list[Any] = []
        self._unused: set[str] = set()  # that have been reported
        self.is_last_part = True  # whether backward() completes the gradients

    def rebind(self, values: Parameters, out: Gradients | None) -> bool:
        """Return False if the variables lie in this memory already; otherwise release them, and
        all are to be added again."""
        use_own_threads()
        arrays = [*values.values(), *(out or {}).values()]
        is_same = len(arrays) == len(self._arrays) and all(map(operator.is_, arrays, self._arrays))
        if is_same and out is self._out:
            return False
        for hook in self._hooks:
            hook.remove()
        for _, parameter, _ in self._trained:
            parameter.grad = None
        self._values, self._out, self._arrays = values, out, arrays
        self._trained, self._state, self._hooks = [], [], []
        return True

    def add_parameter(self, name: str, parameter: Any) -> None:
        """Keep a parameter in the memory; its gradient, too, if it is trained."""
        parameter.data = tensor_over(self._values[name])
        if self._out is None or name not in self._out:
            return
        view = tensor_over(self._out[name])
        self._trained.append((name, parameter, view))
        if isinstance(self._out, Buffers) and self._out.on_written is not None:

            def on_accumulated(parameter: Any) -> None:
                if self.is_last_part and self._out is not None:
                    if parameter.grad is not view:
                        self._take_in(name, parameter, view)
                    written(self._out, name)

            self._hooks.append(parameter.register_post_accumulate_grad_hook(on_accumulated))

    def add_state(self, name: str, owner: Any, attribute: str) -> None:
        """Keep a tensor in the memory that a step may write to, or replace in its owner."""
        result = None if self._out is None else tensor_over(self._out[name])
        self._state.append(_State(owner, attribute, tensor_over(self._values[name]), result))

    def load(self) -> None:
        """Give the state its current values."""
        for state in self._state:
            state.load()

    def clear(self) -> None:
        """Make all gradients 0 before a step."""
        torch._foreach_zero_([view for _, _, view in self._trained])

    def complete(self) -> None:
        """Take in what a step has left elsewhere.

        Raises:
            ConfigError: a gradient is sparse, or no parameter has one.
        """
        if self._trained and all(parameter.grad is None for _, parameter, _ in self._trained):
            raise ConfigError(
                f"no parameter of {self._owner!r} has a gradient; a loop of your own calls "
                "loss.backward() before session.step(loss)"
            )
        for name, parameter, view in self._trained:
            if parameter.grad is not view:
                self._take_in(name, parameter, view)
        for state in self._state:
            state.store()

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


class _State:
    """One tensor of the state."""

    def __init__(self, owner: Any, attribute: str, source: Any, result: Any) -> None:
        """``source``: its value before a step. ``result``: where its new value goes, if at all."""
        self._owner, self._attribute = owner, attribute
        self._source, self._result = source, result
        self._tensor = getattr(owner, attribute)
        is_there = result is not None and result.dtype == self._tensor.dtype
        self._tensor.data = result if is_there else self._tensor.clone()

    def load(self) -> None:
        self._tensor.copy_(self._source)

    def store(self) -> None:
        current = getattr(self._owner, self._attribute)
        if current.data_ptr() != self._result.data_ptr():  # replaced, or of another dtype
            self._result.copy_(current)
        if current is not self._tensor:
            setattr(self._owner, self._attribute, self._tensor)


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
