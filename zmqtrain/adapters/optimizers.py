"""Optimizers of frameworks, given as they are, as the fields of a job that train the same."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from zmqtrain.errors import ConfigError
from zmqtrain.optim.inner import Inner
from zmqtrain.units import counted
from zmqtrain.user_code import is_of, user_code

log = logging.getLogger(__name__)

_INNER = {
    "torch": "lambda parameters: torch.optim.NAdam(parameters, lr=0.001)",
    "jax": "optax.adam(0.001)",
    "keras": "keras.optimizers.Nadam(0.001)",
}
"""Inner optimizers of the models of a framework."""


def fields_of(optimizer: Any, model: Any) -> dict[str, Any]:
    """Return the job's fields that the optimizer decides; {}: it is of no framework.

    Raises:
        ConfigError: no rule computes the same.
    """
    if is_of(optimizer, "keras"):
        from zmqtrain.adapters import keras_optimizers

        if isinstance(optimizer, type):
            raise ConfigError(
                f"it is the class {optimizer.__name__}; expected an object, such as "
                f"keras.optimizers.{optimizer.__name__}(0.001)"
            )
        if updates := int(optimizer.iterations):
            text = "the job begins with a new %s, without its state after %s; a logdir keeps that"
            log.warning(text, type(optimizer).__name__, counted(updates, "update"))
        return keras_optimizers.fields_of(optimizer)
    is_class = isinstance(optimizer, type)
    if is_of(optimizer, "torch.optim") and not is_class:
        raise ConfigError(
            f"this {type(optimizer).__name__} updates another module than the job's; expected a "
            "function that makes one; write lambda parameters: torch.optim.AdamW(parameters)"
        )
    makes_one = is_of(optimizer, "torch.optim") if is_class else callable(optimizer)
    if makes_one and is_of(model, "zmqtrain.adapters.torch"):
        from zmqtrain.adapters import torch_optimizers

        with user_code("build()", model):
            module = model.module
        return torch_optimizers.taken_over(optimizer, module)
    return {}


def inner_text(given: Any, model: Any) -> str:
    """Return a text of a framework's optimizer that trains this model in local steps.

    Raises:
        ConfigError: it cannot.
    """
    framework = next((name for name in _INNER if is_of(model, f"zmqtrain.adapters.{name}")), None)
    if framework == "torch" and callable(given) and not is_of(given, "keras", "optax"):
        from zmqtrain.adapters import torch_inner

        with user_code("build()", model):
            module = model.module
        return repr(torch_inner.checked(given, module))
    if framework == "keras" and is_of(given, "keras") and not isinstance(given, type):
        from zmqtrain.adapters import keras_inner

        return keras_inner.check(given)
    if framework == "jax" and _is_transformation(given):
        return f"optax {given.update.__qualname__}"
    others = f", or one of its framework, such as {_INNER[framework]}" if framework else ""
    raise ConfigError(f"expected a rule of zmqtrain.optim{others}; correct inner in the job")


def inner_of(
    given: Any, model: Any, values: Mapping[str, Any], gradients: Mapping[str, Any]
) -> Inner:
    """Return an optimizer for which :func:`inner_text` has a text, over arrays by name.

    Raises:
        ConfigError: it cannot be made.
    """
    if _is_transformation(given):
        from zmqtrain.adapters.jax_inner import JaxInner

        with user_code("init()", given):
            return JaxInner(given, model.trained_tree, values, gradients)
    if is_of(given, "keras"):
        from zmqtrain.adapters.keras_inner import KerasInner

        return KerasInner(given, model.new_variables(), values, gradients)
    from zmqtrain.adapters.torch_inner import TorchInner

    return TorchInner(given, model.new_module(), values, gradients)


def _is_transformation(given: Any) -> bool:
    is_pair = callable(getattr(given, "init", None)) and callable(getattr(given, "update", None))
    return is_pair and not isinstance(given, type) and not is_of(given, "keras")
