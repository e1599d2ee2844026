"""Losses of torch's kind: their arguments, the weights of examples, and their divisors."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from zmqtrain.errors import ConfigError

_KINDS = nn.CrossEntropyLoss, nn.NLLLoss
_FUNCTIONS = nn.functional.cross_entropy, nn.functional.nll_loss

_BY_ELEMENT = (
    *(nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss),
    *(nn.functional.mse_loss, nn.functional.l1_loss),
    *(nn.functional.smooth_l1_loss, nn.functional.huber_loss),
)
"""Losses that broadcast outputs and targets."""


def check_loss(loss: Any) -> None:
    """
    Raises:
        ConfigError: it cannot be called with outputs and targets, or is not a mean over examples.
    """
    if isinstance(loss, type):
        module = "nn." if issubclass(loss, nn.Module) else ""
        raise ConfigError(
            f"the loss is the class {loss.__name__}; expected a function or an instance: give "
            f"{module}{loss.__name__}()"
        )
    if loss is not None and not callable(loss):
        known = isinstance(loss, str) and hasattr(nn.functional, loss)
        raise ConfigError(
            f"the loss is {loss!r:.80}; expected a function of outputs and targets, such as "
            f"torch.nn.functional.{loss if known else 'cross_entropy'}"
        )
    if reduction_of(loss) == "sum":
        raise ConfigError(
            f"the loss {loss} adds up the losses of its examples, so it depends on the "
            'size of a batch; expected a mean over examples: reduction="mean"'
        )


def weighted_loss(loss: Any, outputs: Any, *targets: Any) -> Any:
    """Return the mean loss; if examples have weights, the mean of their weighted losses.

    Raises:
        ConfigError: the loss would broadcast targets, take inputs for them, or weigh classes
            beside the examples.
    """
    is_weighted = has_weights(loss, targets)
    if len(targets) > 1 and _takes_labels_alone(loss) and not is_weighted:
        raise ConfigError(
            f"a batch has {1 + len(targets)} arrays, and the loss takes outputs and labels; "
            "expected (inputs, labels), or (inputs, labels, weights) with a float for each "
            "example; for several inputs give TorchModel(training_step=lambda module, batch: ...), "
            "which returns the loss"
        )
    if targets and (getattr(loss, "func", loss) in _BY_ELEMENT or type(loss) in _BY_ELEMENT):
        _check_axes(outputs, targets[0])
    if not is_weighted:
        return loss(outputs, *targets)
    labels, weights = targets
    if getattr(loss, "weight", None) is not None:
        raise ConfigError(
            f"examples have weights, and {loss} weighs classes; expected the mean of each "
            "example's own loss: a loss without weight"
        )
    if isinstance(loss, nn.Module):
        each = copy.copy(loss)
        each.reduction = "none"
        losses = each(outputs, labels)
    else:
        losses = loss(outputs, labels, reduction="none")
    return (losses.reshape(len(weights), -1).mean(1) * weights).mean()


def _check_axes(outputs: Any, target: Any) -> None:
    """Refuse targets with another number of axes, each of which would count for every output."""
    shapes = [tuple(getattr(each, "shape", ())) for each in (target, outputs)]
    if all(shapes) and len(shapes[0]) != len(shapes[1]):
        raise ConfigError(
            f"the loss would compare each target with several outputs: targets have the shape "
            f"{shapes[0]}, outputs {shapes[1]}; expected equal shapes: reshape the targets, as in "
            "y.reshape(-1, 1), or the outputs, as in squeeze(1)"
        )


def loss_in(outputs: Any, owner: object) -> Any:
    """Return the loss that a module has computed with its outputs.

    Raises:
        ConfigError: there is none.
    """
    found = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if found is None and isinstance(outputs, tuple) and outputs:
        found = outputs[0]
    if found is None:
        raise ConfigError(
            f"the module of {owner!r} returned a {type(outputs).__name__} without a loss; expected "
            'outputs.loss, outputs["loss"] or a tuple that begins with it: have batches with '
            "labels, or give TorchModel a loss or a training_step"
        )
    return found


def denominator_of(loss: Any, targets: tuple[Any, ...]) -> float | None:
    """Return the number by which torch's cross_entropy or nll_loss divides a sum of losses.

    None: it is another loss, or the examples have weights of their own.
    """
    function, options = getattr(loss, "func", loss), getattr(loss, "keywords", {})
    if type(loss) not in _KINDS and function not in _FUNCTIONS:
        return None
    if len(targets) != 1 or not isinstance(labels := targets[0], torch.Tensor):
        return None
    if labels.is_floating_point():  # probabilities of the classes, on the second axis
        return float(labels.numel() / labels.shape[labels.ndim > 1])
    ignored = getattr(loss, "ignore_index", options.get("ignore_index", -100))
    counted = labels != ignored
    weights = class_weights_of(loss)
    return float(counted.sum() if weights is None else weights[labels[counted]].sum())


def class_weights_of(loss: Any) -> Any:
    """Return the weights of classes of a loss of torch's kind; None: it has none."""
    return getattr(loss, "weight", getattr(loss, "keywords", {}).get("weight"))


def are_classes(outputs: Any, targets: Any) -> bool:
    """Return whether outputs are scores (n, classes) of at least two classes, and targets (n,) are
    numbers of these classes."""
    is_scores = isinstance(outputs, torch.Tensor) and outputs.ndim == 2 and outputs.shape[1] > 1
    if not is_scores or targets.shape != outputs.shape[:1] or targets.is_floating_point():
        return False
    return bool(((targets >= 0) & (targets < outputs.shape[1])).all())


def takes_one_target(loss: Any) -> bool:
    """Return whether a loss has two arguments without defaults: outputs and labels."""
    required = [one for one in _parameters(loss).values() if one.default is one.empty]
    return len(required) == 2 and all(one.kind is not one.VAR_POSITIONAL for one in required)


def reduction_of(loss: Any) -> Any:
    """Return the ``reduction`` of a loss of torch's kind; None: it is not known."""
    options = getattr(loss, "keywords", {})
    return getattr(loss, "reduction", options.get("reduction"))


def call_of(loss: Any) -> Any:
    """Return the function that has the arguments of a loss."""
    return loss.forward if isinstance(loss, nn.Module) else loss


def _parameters(loss: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a loss by name; none if they are not known."""
    try:
        return inspect.signature(call_of(loss)).parameters
    except (TypeError, ValueError):
        return {}


def has_weights(loss: Any, targets: tuple[Any, ...]) -> bool:
    """Return whether a loss of torch's kind gets labels and a weight for each example."""
    if len(targets) != 2 or not isinstance(targets[1], torch.Tensor):
        return False
    is_row_each = targets[1].ndim == 1 and targets[1].is_floating_point()
    return is_row_each and _takes_labels_alone(loss)


def _takes_labels_alone(loss: Any) -> bool:
    """Return whether it is a loss of torch's kind of outputs and labels."""
    takes_reduction = hasattr(loss, "reduction") or "reduction" in _parameters(loss)
    return takes_reduction and takes_one_target(loss)
