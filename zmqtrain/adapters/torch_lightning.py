"""A ``LightningModule`` without Lightning: its steps, what they log, and its optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from re import search
from typing import Any

import torch

from zmqtrain.errors import ConfigError
from zmqtrain.user_code import parameters_of

_TAKEN = {"training_step", "validation_step", "predict_step", "configure_optimizers"}


def is_lightning(module: Any) -> bool:
    """Return whether a module derives from LightningModule."""
    return any(kind.__name__ == "LightningModule" for kind in type(module).__mro__)


def steps_of(module: Any) -> list[Any]:
    """Return training_step, validation_step and predict_step (None without one of the user's) as
    functions of a module and a batch.

    Raises:
        ConfigError: it has hooks that only Lightning's Trainer calls.
    """
    kinds, name = type(module).__mro__, type(module).__name__
    at = [kind.__name__ for kind in kinds].index("LightningModule")
    own, theirs = ({n for kind in part for n in vars(kind)} for part in (kinds[:at], kinds[at:]))
    hooks = own & theirs - _TAKEN - set(dir(torch.nn.Module))
    hooks -= {hook for hook in hooks if search("^_|test_|_dataloader$", hook)}
    if hooks or not getattr(module, "automatic_optimization", True):
        raise ConfigError(
            f"{name} has {', '.join(sorted(hooks)) or 'manual optimization'}, for Lightning's "
            f"Trainer alone; expected nothing of Lightning's but {', '.join(sorted(_TAKEN))}; move "
            "it into build(), a step, a callback of the job or a loop of your own"
        )
    validation = "validation_step" if "validation_step" in own else "training_step"
    predict = _predicted if "predict_step" in own else None
    return [partial(_measured, "training_step"), partial(_measured, validation), predict]


def configured(_: Any, module: Any) -> Any:
    """Return the module's optimizers, as a function of ``Job(optimizer=...)`` returns them."""
    match _called("configure_optimizers", module)[0]:
        case {"optimizer": optimizer, **rest} | [{"optimizer": optimizer, **rest}]:
            given = rest.get("lr_scheduler")
        case [[optimizer], [given] | given]:
            pass
        case [optimizer] | optimizer:
            given = None
    if not given:
        return optimizer
    options = given if isinstance(given, Mapping) else {"scheduler": given}
    every = options.get("frequency", 1) if options.get("interval") == "step" else "epoch"
    return optimizer, options["scheduler"], every


class _Alone:
    """A stand-in for a module's trainer, which records the values that the module logs."""

    def __init__(self) -> None:
        self.logged: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        raise ConfigError(
            f"the module uses trainer.{name}; expected no use of Lightning's Trainer, as in "
            "self.trainer, self.global_step, self.current_epoch and self.logger; give the module "
            "values in build(), log with self.log, or write a callback of the job"
        )

    def log(self, name: str, value: Any, *_: Any, reduce_fx: Any = "mean", **__: Any) -> None:
        if not hasattr(value, "__float__") or reduce_fx not in ("mean", torch.mean):
            raise ConfigError(
                f"self.log({name!r}) gets a {type(value).__name__}, reduce_fx={reduce_fx!r}; "
                "expected a mean over the batch, such as the value that a metric returns"
            )
        self.logged[name.removeprefix("val_")] = value


def _called(method: str, module: Any, *arguments: Any) -> tuple[Any, dict[str, Any]]:
    """Call a method with the arguments that it takes; return its result, and the logged values."""
    alone, call = _Alone(), getattr(module, method)
    module.log, module.trainer = alone.log, alone
    try:
        return call(*arguments[: len(parameters_of(call))]), alone.logged
    finally:
        del module.log
        module.trainer = None


def _measured(step: str, module: Any, batch: Any) -> dict[str, Any]:
    found, logged = _called(step, module, batch, 0)
    loss = found.get("loss") if isinstance(found, Mapping) else found
    return logged if loss is None else logged | {"loss": loss}


def _predicted(module: Any, batch: Any) -> Any:
    return _called("predict_step", module, batch, 0)[0]
