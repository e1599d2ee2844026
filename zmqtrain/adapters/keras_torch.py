"""Steps of a Keras model on the torch backend, in the worker's memory."""

from __future__ import annotations

from functools import partial
from typing import Any

import keras
import numpy as np
import torch
from keras.src.backend import get_keras_mask, set_keras_mask

from zmqtrain.adapters.common import constant_loss
from zmqtrain.adapters.keras_tables import whole_ids
from zmqtrain.adapters.torch_arrays import tensor_over
from zmqtrain.adapters.torch_memory import BoundVariables, seed_torch
from zmqtrain.adapters.torch_tables import TableWeight
from zmqtrain.adapters.torch_tables_of import ModuleTables
from zmqtrain.models.base import Gradients, Parameters


class OnTorch:
    """A network whose variables are the worker's memory."""

    def __init__(self, network: Any, owner: object) -> None:
        self._network, self._model = network, network.model
        self._bound = BoundVariables(owner)
        self._tables = ModuleTables({n: TableWeight(t.table) for n, t in network.tables.items()})
        for name, weight in self._tables.weights.items():
            network.tables[name].look_up = partial(_rows_of, weight, name)

    def seed(self, seed: int, batch: int) -> None:
        """Seed layers that draw from torch's own generator."""
        seed_torch(seed, batch)

    def step(
        self, values: Parameters, parts: tuple[Any, ...], out: Gradients, *, is_measured: bool
    ) -> tuple[Any, Any, dict[str, Any]]:
        """Write gradients and new state into ``out``; return loss, outputs, and measures.

        Raises:
            ConfigError: nothing that is trained has a gradient.
        """
        parts = self._begin(values, parts, out)
        self._bound.clear()
        if is_measured:
            self._model.reset_metrics()  # some keep the loss of an output
        loss, outputs = self._loss_of(parts, training=True)
        if not loss.requires_grad:
            raise constant_loss(self._network.owner)
        loss.backward()
        self._bound.complete(has_others=self._tables.complete())
        loss, outputs = loss.detach(), keras.tree.map_structure(_detached, outputs)
        with torch.no_grad():
            return loss, outputs, self._measures(parts, outputs) if is_measured else {}

    def evaluate(
        self, values: Parameters, parts: tuple[Any, ...]
    ) -> tuple[Any, Any, dict[str, Any]]:
        """Return loss, outputs, and measures."""
        parts = self._begin(values, parts)
        self._model.reset_metrics()
        with torch.no_grad():
            loss, outputs = self._loss_of(parts, training=False)
            return loss, outputs, self._measures(parts, outputs)

    def predict(self, values: Parameters, inputs: Any) -> Any:
        inputs = self._begin(values, inputs)
        with torch.no_grad():
            return self._call(inputs, training=False)

    def _measures(self, parts: tuple[Any, ...], outputs: Any) -> dict[str, Any]:
        x, y, weights = parts
        measures: dict[str, Any] = self._model.compute_metrics(x, y, outputs, _copied(weights))
        return measures

    def _loss_of(self, parts: tuple[Any, ...], *, training: bool) -> tuple[Any, Any]:
        x, y, weights = parts
        outputs = self._call(x, training=training)
        loss = self._model.compute_loss(
            x=x, y=y, y_pred=outputs, sample_weight=_copied(weights), training=training
        )
        return loss, outputs

    def _call(self, inputs: Any, *, training: bool) -> Any:
        options = {"training": training} if self._model._call_has_training_arg else {}
        return self._model(inputs, **options)

    def _begin(self, values: Parameters, batch: Any, out: Gradients | None = None) -> Any:
        """Make the variables those of this memory, and load the state; without ``out`` for an
        evaluation. Return the batch as tensors."""
        network = self._network
        if self._bound.rebind(values, out):
            network.initial_seed = None
            for name, variable in (network.trained | network.frozen).items():
                self._bound.add_parameter(name, variable.value)
            for name, variable in network.state.items():
                self._bound.add_state(name, variable, "_value")
            first = tensor_over(next((values[n] for n in network.variables), np.zeros(0, "f")))
            self._tables.bind(values, out, first.device, torch.float32)
        self._bound.load()
        batch = _tensors(batch)
        self._tables.begin(batch)
        return batch


def _rows_of(weight: TableWeight, name: str, ids: Any) -> Any:
    if ids.is_floating_point():
        ids = torch.from_numpy(whole_ids(ids.detach().cpu().numpy(), name)).to(ids.device)
    return weight[ids]


def _copied(weights: Any) -> Any:
    """Return weights for Keras, which multiplies the mask of outputs into its weights."""
    return None if weights is None else weights.clone()


def _detached(output: Any) -> Any:
    """Return an output without its graph, but with its mask."""
    detached = output.detach()
    set_keras_mask(detached, get_keras_mask(output))
    return detached


def _tensors(parts: Any) -> Any:
    """Return nested arrays as tensors."""
    return keras.tree.map_structure(lambda part: None if part is None else tensor_over(part), parts)
