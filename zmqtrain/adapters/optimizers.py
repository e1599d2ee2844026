"""Optimizers of frameworks, given as they are, as the fields of a job that train the same."""

from __future__ import annotations

from typing import Any

from zmqtrain.errors import ConfigError
from zmqtrain.user_code import is_of, user_code


def fields_of(optimizer: Any, model: Any) -> dict[str, Any]:
    """Return what the optimizer makes of the fields optimizer, l2 and groups; {}: it is no other's.

    Raises:
        ConfigError: no rule computes the same.
    """
    if is_of(optimizer, "keras"):
        from zmqtrain.adapters import keras_optimizers

        return {"optimizer": keras_optimizers.rule_of(optimizer)}
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
