"""The objective of a PyTorch module: its loss, the measures beside it, and their weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from zmqtrain.adapters.common import check_takes
from zmqtrain.adapters.torch_batches import outputs_of, targets_of
from zmqtrain.adapters.torch_losses import (
    are_classes,
    call_of,
    check_loss,
    class_weights_of,
    denominator_of,
    has_weights,
    loss_in,
    weighted_loss,
)
from zmqtrain.errors import ConfigError
from zmqtrain.models.base import Batch
from zmqtrain.models.weights import checked_weight
from zmqtrain.user_code import user_code

_SEVERAL_INPUTS = (
    "the first one goes into the module, the others into the loss; for several inputs give "
    "TorchModel(training_step=lambda module, batch: ...), which returns the loss"
)
_NO_LOSS = "without a loss all of them go into the module; expected TorchModel(build, loss)"
_NO_PREDICT = "training_step is not called here; give TorchModel(predict=lambda module, batch: ...)"
_TARGETS = "expected inputs and targets, as in data=(inputs, targets)"


@dataclass(frozen=True)
class Objective:
    """Functions of the user, called with a module and batches of tensors; see TorchModel.

    ``owner``: the model, for texts.

    Raises:
        ConfigError: they do not fit together.
    """

    owner: object
    loss: Callable[..., Any] | None
    training_step: Callable[[Any, Any], Any] | None
    metrics: Callable[..., Mapping[str, Any]] | None
    predict: Callable[[Any, Any], Any] | None
    weight: Callable[[Any], Any] | None
    labels_at: int | None

    def __post_init__(self) -> None:
        if self.loss is not None and self.training_step is not None:
            raise ConfigError(
                "TorchModel got both loss(outputs, targets) and training_step(module, batch); "
                "expected one, or neither for a module that returns its loss: leave one out"
            )
        check_loss(self.loss)

    @property
    def weighs_measures(self) -> bool:
        """Whether other mean measures have the weight of the loss."""
        return self.weight is not None or class_weights_of(self.loss) is None

    def weight_of(self, batch: Any) -> float | None:
        """Return the weight of a batch; None: the number of its examples.

        Raises:
            ConfigError: ``weight`` returns none.
        """
        if self.weight is None:
            found = denominator_of(self.loss, targets_of(batch))
            return None if found is None else checked_weight(found, self.owner)
        with torch.no_grad(), user_code("weight()", self.owner):
            return checked_weight(self.weight(batch), self.owner)

    def outputs_of(self, module: Any, batch: Any) -> Any:
        """Return the output of the module for a batch.

        Raises:
            ConfigError: ``forward`` needs more than the first array of a tuple.
        """
        is_whole = self.loss is None
        try:
            return outputs_of(module, batch, is_whole=is_whole)
        except TypeError:
            if isinstance(batch, tuple):
                inputs = [f"input {at}" for at in range(len(batch) if is_whole else 1)]
                remedy = _NO_LOSS if is_whole else _SEVERAL_INPUTS
                if self.training_step is not None:
                    remedy = _NO_PREDICT
                check_takes(module.forward, *inputs, remedy=f"{_count(batch)}; {remedy}")
            raise

    def loss_of(self, module: Any, batch: Any) -> tuple[Any, Any, Mapping[str, Any]]:
        """Return the loss, the outputs (None if they are not known) and other measures.

        Raises:
            ConfigError: the loss is not a number that depends on the parameters.
        """
        outputs: Any = None
        measures: Mapping[str, Any] = {}
        if self.training_step is not None:
            loss = self.training_step(module, batch)
            if isinstance(loss, Mapping):
                measures, loss = loss, loss.get("loss")
        else:
            outputs = self.outputs_of(module, batch)
            loss = self.loss_by(self.loss, outputs, batch)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            found = f"a {type(loss).__name__}"
            if isinstance(loss, torch.Tensor):
                found = f"of shape {list(loss.shape)}, requires_grad={loss.requires_grad}"
            raise ConfigError(
                f"the loss of {self.owner!r} is {found}; expected a tensor of one number that "
                "depends on the parameters: return the mean over the batch, before item() or "
                "detach()"
            )
        return loss, outputs, measures

    def loss_by(self, loss: Any, outputs: Any, batch: Any) -> Any:
        """Return the mean loss, computed by ``loss``; None: by the module."""
        if loss is None:
            return loss_in(outputs, self.owner)
        targets = targets_of(batch)
        try:
            return weighted_loss(loss, outputs, *targets)
        except TypeError:
            names = ["outputs", *(f"target {at}" for at in range(len(targets)))]
            check_takes(call_of(loss), *names, remedy=f"{_count(batch)}; {_TARGETS}")
            raise

    def measures_of(self, module: Any, batch: Any) -> Mapping[str, Any]:
        """Return the mean measures of an evaluation."""
        if self.training_step is not None:
            if self.metrics is not None:
                return self.metrics(module, batch)
            found = self.training_step(module, batch)
            return found if isinstance(found, Mapping) else {"loss": found}
        outputs = self.outputs_of(module, batch)
        loss = self.loss_by(self.loss, outputs, batch)
        return {"loss": loss, **self.beside_loss(outputs, batch)}

    def beside_loss(self, outputs: Any, batch: Any) -> Mapping[str, Any]:
        """Return mean measures of outputs: those of ``metrics``, or the accuracy if it is one."""
        targets = targets_of(batch)
        if has_weights(self.loss, targets):
            targets = targets[:1]
        if self.metrics is not None:
            return self.metrics(outputs, *targets)
        at = 1 if self.labels_at is None and len(targets) == 1 else self.labels_at
        labels = targets[at - 1] if at and at <= len(targets) else None
        if isinstance(labels, torch.Tensor) and are_classes(outputs, labels):
            return {"accuracy": (outputs.argmax(1) == labels).float().mean()}
        return {}

    def prediction(self, batch: Batch) -> tuple[Callable[[Any, Any], Any], Any]:
        """Return a function of the module and inputs that returns its outputs, and the inputs.

        Raises:
            ConfigError: several arrays go into the module, or may.
        """
        if self.predict is not None:
            return self.predict, batch
        if self.training_step is not None and (self.labels_at or len(batch) - 1) > 1:
            raise ConfigError(
                f"a batch of {self.owner!r} has {len(batch)} arrays, and only its training_step "
                "knows which go into the module; give TorchModel(predict=lambda module, batch: "
                "module(...)), or labels_at=1 if the first one does"
            )
        return self.outputs_of, batch[:1] if isinstance(batch, tuple) else batch


def _count(batch: Any) -> str:
    """Describe the number of arrays of a batch."""
    count = len(batch) if isinstance(batch, tuple) else 1
    return "a batch has one array" if count == 1 else f"a batch has {count} arrays"
