"""Optimizers of torch that train a worker's own parameters in local steps, as they are."""

from __future__ import annotations

import inspect
import io
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from zmqtrain.adapters.torch_arrays import variable_over
from zmqtrain.adapters.torch_memory import use_own_threads
from zmqtrain.adapters.torch_optimizers import Made, made_by
from zmqtrain.errors import ConfigError


class TorchInner:
    """The optimizers that a function of the user's makes, over parameters in the worker's memory.

    They train a module of their own, whose parameters are that memory.
    """

    def __init__(
        self, make: Callable[..., Any], module: Any, values: Mapping[str, Any], gradients: Any
    ) -> None:
        """``module``: a new one. ``values``, ``gradients``: arrays of its trained parameters.

        Raises:
            ConfigError: see :func:`checked`.
        """
        self._parameters, self._memory, self._gradients = {}, {}, {}
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                self._memory[name] = parameter.data = variable_over(values[name], parameter)
                self._parameters[name] = parameter
                self._gradients[name] = variable_over(gradients[name], parameter)
        self._made = checked(make, module)
        self._optimizers = [optimizer for optimizer, _, _ in self._made]
        kinds = [f"{type(one).__module__}.{type(one).__qualname__}" for one in self._optimizers]
        self.kind = ", ".join(kinds)
        first = self._optimizers[0]
        rate = float(first.param_groups[0]["lr"]) if "lr" in first.param_groups[0] else None
        self._with_first_rate = [
            (optimizer, number)
            for optimizer in self._optimizers
            for number, group in enumerate(optimizer.param_groups)
            if type(optimizer) is type(first) and group.get("lr") == rate
        ]
        self._step = 0
        self._rate: float | None = None
        self._turns = [0] * len(self._made)  # of each scheduler

    def go_on(self, step: int, learning_rate: float | None) -> None:
        self._step, self._rate = step, learning_rate
        with warnings.catch_warnings():  # of a scheduler that is ahead of a new optimizer
            warnings.filterwarnings("ignore", "Detected call of .lr_scheduler.step")
            self._follow()

    def update(self, absent: Collection[str]) -> None:
        use_own_threads()
        if self._rate is not None:
            for optimizer, number in self._with_first_rate:
                optimizer.param_groups[number]["lr"] = self._rate
        for name, parameter in self._parameters.items():
            parameter.grad = None if name in absent else self._gradients[name]
        for optimizer in self._optimizers:
            optimizer.step()
        for name, parameter in self._parameters.items():
            if parameter.data_ptr() != self._memory[name].data_ptr():  # its data were replaced
                parameter.data = self._memory[name].copy_(parameter.data)
        self._step += 1
        self._follow()

    def state(self) -> dict[str, NDArray[Any]]:
        buffer = io.BytesIO()
        torch.save([optimizer.state_dict()["state"] for optimizer in self._optimizers], buffer)
        return {"state": np.frombuffer(buffer.getvalue(), np.uint8)}

    def load(self, state: Mapping[str, NDArray[Any]]) -> None:
        saved = torch.load(io.BytesIO(state["state"].tobytes()), weights_only=True)
        for optimizer, own in zip(self._optimizers, saved, strict=True):
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": own, "param_groups": groups})

    def _follow(self) -> None:
        """Step the schedulers up to the job's present step."""
        for number, (_, scheduler, every) in enumerate(self._made):
            while scheduler is not None and self._turns[number] < self._step // every:
                scheduler.step()
                self._turns[number] += 1


def checked(make: Callable[..., Any], module: Any) -> list[Made]:
    """Return the optimizers that ``make`` makes, see ``torch_optimizers.made_by``.

    Raises:
        ConfigError: one of the optimizers cannot train in local steps, or ``make`` fails.
    """
    made, _ = made_by(make, module)
    for optimizer, _, _ in made:
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            name = type(optimizer).__name__
            raise ConfigError(
                f"{name} computes the loss several times in a step, by a closure, and local steps "
                "compute each gradient once; expected an optimizer whose step() needs no closure, "
                "such as torch.optim.NAdam"
            )
    return made
