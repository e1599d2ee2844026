"""Keras's optimizers and schedules as those of zmqtrain.

Each pair computes the same update, up to rounding. Optimizers without a twin are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from zmqtrain.errors import ConfigError
from zmqtrain.optim import (
    LAMB,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Cosine,
    Exponential,
    Ftrl,
    InverseTime,
    Lion,
    Momentum,
    NAdam,
    Piecewise,
    Polynomial,
    RMSProp,
    Rule,
    Schedule,
    Warmup,
)

_REMEDIES = {
    "clipnorm": "give the job clip_norm, which is for all variables together",
    "global_clipnorm": "give the job clip_norm",
    "clipvalue": "give the job clip_norm",
    "use_ema": "give the job moving_average",
    "loss_scale_factor": "compute in bfloat16, which needs none",
    "gradient_accumulation_steps": "use the policy sync-replicas:aggregate=R",
}
"""Options that no rule has, and remedies."""


def rule_of(optimizer: Any) -> Rule:
    """Return the rule that computes the update of a Keras optimizer.

    Raises:
        ConfigError: there is none.
    """
    options = optimizer.get_config()
    for name, remedy in _REMEDIES.items():
        if options.get(name):
            raise _no_twin(f"{name}={options[name]!r} of {_name(optimizer)}", remedy)
    if getattr(optimizer, "_exclude_from_weight_decay_cache", None) is not None:
        raise _no_twin(f"exclude_from_weight_decay of {_name(optimizer)}", "leave it out")
    # On torch, Keras has a class of the same name for each optimizer.
    if not type(optimizer).__module__.startswith("keras.") or _name(optimizer) not in _RULES:
        raise _no_twin(f"the optimizer {_name(optimizer)}", f"expected one of {', '.join(_RULES)}")
    rate = _rate_of(options["learning_rate"])
    rule = _RULES[_name(optimizer)](options | {"learning_rate": rate})
    decay = options.get("weight_decay")
    if decay and decay != getattr(rule, "weight_decay", None):
        raise _no_twin(f"weight_decay of {_name(optimizer)}", "use AdamW or Lion")
    return rule


def _sgd(o: dict[str, Any]) -> Rule:
    if not o["momentum"]:
        return SGD(o["learning_rate"])
    return Momentum(o["learning_rate"], o["momentum"], o["nesterov"], scaled_velocity=True)


def _adam(o: dict[str, Any]) -> Rule:
    numbers = o["learning_rate"], o["beta_1"], o["beta_2"], o["epsilon"]
    if o["weight_decay"] or o["amsgrad"]:
        return AdamW(*numbers, o["weight_decay"] or 0.0, epsilon_hat=True, amsgrad=o["amsgrad"])
    return Adam(*numbers)


def _nadam(o: dict[str, Any]) -> Rule:
    numbers = o["learning_rate"], o["beta_1"], o["beta_2"], o["epsilon"]
    return NAdam(*numbers, o["weight_decay"] or 0.0, momentum_decay=1.0)


def _ftrl(o: dict[str, Any]) -> Rule:
    return Ftrl(
        o["learning_rate"],
        o["learning_rate_power"],
        o["initial_accumulator_value"],
        l1=o["l1_regularization_strength"],
        l2=o["l2_regularization_strength"],
        l2_shrinkage=o["l2_shrinkage_regularization_strength"],
        beta=o["beta"],
    )


_RULES: dict[str, Callable[[dict[str, Any]], Rule]] = {
    "SGD": _sgd,
    "Adam": _adam,
    "AdamW": _adam,
    "Nadam": _nadam,
    "RMSprop": lambda o: RMSProp(
        *(o["learning_rate"], o["rho"], o["momentum"], o["epsilon"], o["centered"]),
        initial_mean_square=0.0,
    ),
    "Adagrad": lambda o: Adagrad(
        o["learning_rate"], o["initial_accumulator_value"], o["epsilon"], epsilon_inside_sqrt=True
    ),
    "Ftrl": _ftrl,
    "Lion": lambda o: Lion(o["learning_rate"], o["beta_1"], o["beta_2"], o["weight_decay"] or 0.0),
    "Lamb": lambda o: LAMB(
        o["learning_rate"], o["beta_1"], o["beta_2"], o["epsilon"], weight_decay=0.0
    ),
}


def _decay(kind: type[Exponential | InverseTime], o: dict[str, Any]) -> Schedule:
    return kind(o["initial_learning_rate"], o["decay_steps"], o["decay_rate"], o["staircase"])


def _cosine(o: dict[str, Any]) -> Schedule:
    if (target := o.get("warmup_target")) is None or not o.get("warmup_steps"):
        return Cosine(o["initial_learning_rate"], o["decay_steps"], o["alpha"])
    fall = Cosine(target, o["decay_steps"], o["alpha"])
    return Warmup(fall, o["warmup_steps"], o["initial_learning_rate"])


_SCHEDULES: dict[str, Callable[[dict[str, Any]], Schedule]] = {
    "ExponentialDecay": partial(_decay, Exponential),
    "InverseTimeDecay": partial(_decay, InverseTime),
    "PiecewiseConstantDecay": lambda o: Piecewise(o["boundaries"], o["values"]),
    "PolynomialDecay": lambda o: Polynomial(
        *(o["initial_learning_rate"], o["decay_steps"], o["end_learning_rate"]),
        *(o["power"], o["cycle"]),
    ),
    "CosineDecay": _cosine,
}


def _rate_of(rate: Any) -> float | Schedule:
    """Return a rate from Keras's config: a number, which went through float32, or a schedule."""
    if not isinstance(rate, dict):
        return float(str(np.float32(rate)))
    name = rate["class_name"]
    if name not in _SCHEDULES:
        expected = ", ".join(_SCHEDULES)
        raise _no_twin(f"the learning-rate schedule {name}", f"expected one of {expected}")
    return _SCHEDULES[name](rate["config"])


def _name(optimizer: Any) -> str:
    return type(optimizer).__name__


def _no_twin(what: str, remedy: str) -> ConfigError:
    return ConfigError(
        f"{what} has no twin in zmqtrain.optim; {remedy}, or give the job an optimizer of its own"
    )
