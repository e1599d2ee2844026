"""Steps of a Keras model on the torch backend, in the worker's memory."""

from __future__ import annotations

import operator
import zlib
from typing import Any

import keras
import torch

from zmqtrain.adapters.torch_memory import GradientViews, tensor_over, use_own_threads
from zmqtrain.models.base import Gradients, Parameters


class OnTorch:
    """A network whose variables are the worker's memory."""

    def __init__(self, network: Any, owner: object) -> None:
        self._network, self._model, self._owner = network, network.model, owner
        self._arrays: list[Any] = []  # that the variables are bound to
        self._out: Gradients | None = None
        self._gradients: GradientViews | None = None
        self._state: list[tuple[Any, Any, Any]] = []  # (tensor, value before, place of the new one)
        self._unused: set[str] = set()

    def seed(self, seed: int, batch: int) -> None:
        """Seed layers that draw from torch's own generator."""
        torch.manual_seed(zlib.crc32(f"{seed} {batch}".encode()))

    def step(self, values: Parameters, parts: tuple[Any, ...], out: Gradients) -> float:
        """Write gradients and new state into ``out``; return the loss."""
        gradients = self._bind(values, out)
        assert gradients is not None
        gradients.clear()
        loss, _ = self._loss_of(_tensors(parts), training=True)
        loss.backward()
        gradients.complete()
        for tensor, _, result in self._state:
            if tensor.data_ptr() != result.data_ptr():
                result.copy_(tensor)
        return float(loss.detach())

    def evaluate(self, values: Parameters, parts: tuple[Any, ...]) -> tuple[Any, Any]:
        """Return loss and outputs; metrics of the model keep the loss of each output."""
        self._bind(values, None)
        with torch.no_grad():
            return self._loss_of(_tensors(parts), training=False)

    def predict(self, values: Parameters, inputs: Any) -> Any:
        self._bind(values, None)
        with torch.no_grad():
            return self._call(_tensors(inputs), training=False)

    def _loss_of(self, parts: tuple[Any, ...], *, training: bool) -> tuple[Any, Any]:
        x, y, weights = parts
        outputs = self._call(x, training=training)
        loss = self._model.compute_loss(
            x=x, y=y, y_pred=outputs, sample_weight=weights, training=training
        )
        return loss, outputs

    def _call(self, inputs: Any, *, training: bool) -> Any:
        options = {"training": training} if self._model._call_has_training_arg else {}
        return self._model(inputs, **options)

    def _bind(self, values: Parameters, out: Gradients | None) -> GradientViews | None:
        """Make the variables those of this memory, and load the state; without ``out`` for an
        evaluation."""
        use_own_threads()
        arrays = [*values.values(), *(out or {}).values()]
        is_bound = len(arrays) == len(self._arrays) and all(map(operator.is_, arrays, self._arrays))
        if not is_bound or out is not self._out:
            self._arrays, self._out = arrays, out
            self._bind_variables(values, out)
        for tensor, source, _ in self._state:
            tensor.copy_(source)
        return self._gradients

    def _bind_variables(self, values: Parameters, out: Gradients | None) -> None:
        network = self._network
        network.initial_seed = None
        if self._gradients is not None:
            self._gradients.close()
        self._gradients = None if out is None else GradientViews(self._owner, out, self._unused)
        for name, variable in (network.trained | network.frozen).items():
            variable.value.data = tensor_over(values[name])
        if self._gradients is not None:
            for name, variable in network.trained.items():
                self._gradients.add(name, variable.value)
        self._state = []
        for name, variable in network.state.items():
            tensor, source = variable.value, tensor_over(values[name])
            result = source if out is None else tensor_over(out[name])
            in_place = out is not None and result.dtype == tensor.dtype
            tensor.data = result if in_place else tensor.data.clone()
            self._state.append((tensor.data, source, result))


def _tensors(parts: Any) -> Any:
    """Return nested arrays as tensors."""
    return keras.tree.map_structure(lambda part: None if part is None else tensor_over(part), parts)
