"""Optimizers of Keras that train a worker's own parameters in local steps, as they are."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import keras
import numpy as np
from keras.optimizers.schedules import LearningRateSchedule
from numpy.typing import NDArray

from zmqtrain.adapters.keras_optimizers import options_in
from zmqtrain.errors import ConfigError

_REMEDIES = {
    "use_ema": "leave it out: the averages would stay with the worker",
    "loss_scale_factor": "compute in bfloat16, which needs none",
    "gradient_accumulation_steps": "give a larger batch_size",
    "exclude_from_weight_decay": "leave it out",
}
"""Options that cannot act inside local steps, and remedies."""


class KerasInner:
    """A copy of an optimizer, over variables of its own that follow the worker's memory."""

    def __init__(
        self,
        optimizer: Any,
        variables: Mapping[str, Any],
        values: Mapping[str, Any],
        gradients: Mapping[str, Any],
    ) -> None:
        """``variables``: new ones of the model, by name."""
        check(optimizer)
        self._variables, self._values, self._gradients = variables, values, gradients
        rate = optimizer._learning_rate
        self._schedule = rate if isinstance(rate, LearningRateSchedule) else None
        config = optimizer.get_config()
        config["learning_rate"] = 0.0 if self._schedule else float(optimizer.learning_rate)
        self._optimizer = type(optimizer).from_config(config)
        self._optimizer.build([variables[name] for name in values])
        rate = self._optimizer._learning_rate
        self._slots = [one for one in self._optimizer.variables if one is not rate]
        self.kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        self._step = 0
        self._rate: float | None = None

    def go_on(self, step: int, learning_rate: float | None) -> None:
        self._step, self._rate = step, learning_rate

    def update(self, absent: Collection[str]) -> None:
        rate = self._rate
        if rate is None and self._schedule is not None:
            rate = self._schedule(self._step)
        if rate is not None:
            self._optimizer.learning_rate = rate
        for name, value in self._values.items():
            self._variables[name].assign(value.copy())
        names = [name for name in self._values if name not in absent]
        # Copies: a step may still be computed while the memory changes.
        gradients = [keras.ops.convert_to_tensor(self._gradients[name].copy()) for name in names]
        if names:
            self._optimizer.apply(gradients, [self._variables[name] for name in names])
        for name in names:
            np.copyto(self._values[name], keras.ops.convert_to_numpy(self._variables[name]))
        self._step += 1

    def state(self) -> dict[str, NDArray[Any]]:
        every = enumerate(self._slots)
        return {str(n): np.array(keras.ops.convert_to_numpy(one)) for n, one in every}

    def load(self, state: Mapping[str, NDArray[Any]]) -> None:
        for number, variable in enumerate(self._slots):
            variable.assign(state[str(number)])


def check(optimizer: Any) -> str:
    """Return a text of the optimizer with its options.

    Raises:
        ConfigError: an option cannot act inside local steps.
    """
    name, rate = type(optimizer).__name__, optimizer._learning_rate
    if callable(rate) and not isinstance(rate, LearningRateSchedule):
        raise ConfigError(
            f"the learning rate of {name} is {rate!r}, a function of nothing; expected a number or "
            "a keras.optimizers.schedules.LearningRateSchedule"
        )
    options = options_in(optimizer)
    for option, remedy in _REMEDIES.items():
        if value := options.get(option):
            raise ConfigError(
                f"{option} of {name} is {value!r}, which cannot act inside local steps; {remedy}"
            )
    return f"{name} {options}"
