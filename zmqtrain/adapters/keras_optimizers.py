"""Keras's optimizers and schedules as those of zmqtrain.

Each pair computes the same update, up to rounding, and may go on where the other one ends.
Optimizers without a twin are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from zmqtrain import optim
from zmqtrain.adapters.common import options_of, train_inside
from zmqtrain.errors import CheckpointError, ConfigError
from zmqtrain.fingerprint import canonical, fingerprint_difference, short
from zmqtrain.optim.moments import mu_product
from zmqtrain.policies import make_policy
from zmqtrain.store.checkpoint import read_parameters
from zmqtrain.store.manifest import read_manifest

_REMEDIES = {
    "clipnorm": "give the job clip_norm, which is for all variables together",
    "use_ema": "give the job moving_average",
    "exclude_from_weight_decay": "leave it out",
    "loss_scale_factor": "compute in bfloat16, which needs none",
    "gradient_accumulation_steps": "use the policy sync-replicas:aggregate=R",
}
"""Options that no rule has, and remedies."""


def fields_of(optimizer: Any) -> dict[str, Any]:
    """Return the fields of a job that trains as a Keras optimizer does.

    Raises:
        ConfigError: no rule computes the same.
    """
    rule, options = rule_of(optimizer), optimizer.get_config()
    clips = {"clip_norm": options["global_clipnorm"], "clip_value": options["clipvalue"]}
    return {"optimizer": rule} | {name: float(value) for name, value in clips.items() if value}


def rule_of(optimizer: Any) -> optim.Rule:
    """Return the rule that computes the update of a Keras optimizer by a gradient, clipped or not.

    Raises:
        ConfigError: there is none.
    """
    options = options_in(optimizer)
    for name, remedy in _REMEDIES.items():
        if options.get(name):
            raise _no_twin(f"{name}={options[name]!r} of {_name(optimizer)}", remedy)
    # On torch, Keras has a class of the same name for each optimizer.
    if not type(optimizer).__module__.startswith("keras.") or _name(optimizer) not in _RULES:
        inside = f"keras.optimizers.{_name(optimizer)}(...)"
        expected = f"expected one of {', '.join(_RULES)}"
        if _name(optimizer) == "Muon":  # which trains some variables by AdamW
            expected = "give Job(optimizer=Muon(rms=0.2), groups=...) of zmqtrain.optim"
        raise _no_twin(
            f"the optimizer {_name(optimizer)}", f"{expected}; or {train_inside(inside)}"
        )
    rule = _rule_of(_name(optimizer), options)
    decay = options.get("weight_decay")
    if decay and decay != getattr(rule, "weight_decay", None):
        raise _no_twin(f"weight_decay of {_name(optimizer)}", "use AdamW or Lion")
    return rule


def options_in(optimizer: Any) -> dict[str, Any]:
    """Return all options of a Keras optimizer, those that its config lacks, too."""
    excluded = getattr(optimizer, "_exclude_from_weight_decay_cache", None)
    return {**optimizer.get_config(), "exclude_from_weight_decay": excluded is not None}


_RULES: dict[str, optim.Rule] = {
    "SGD": optim.Momentum(0.0, scaled_velocity=True),
    "Adam": optim.Adam(),
    "AdamW": optim.AdamW(epsilon_hat=True),
    "Adamax": optim.Adamax(epsilon_in_max=False),
    "Nadam": optim.NAdam(momentum_decay=1.0),
    "RMSprop": optim.RMSProp(0.0, initial_mean_square=0.0),
    "Adagrad": optim.Adagrad(0.0, epsilon=1e-7, epsilon_inside_sqrt=True),
    "Ftrl": optim.Ftrl(0.0),
    "Lion": optim.Lion(),
    "Lamb": optim.LAMB(weight_decay=0.0),
    "Adafactor": optim.Adafactor(),
}
_SCHEDULES: dict[str, Any] = {
    "ExponentialDecay": optim.Exponential,
    "InverseTimeDecay": optim.InverseTime,
    "PiecewiseConstantDecay": optim.Piecewise,
    "PolynomialDecay": optim.Polynomial,
    "CosineDecay": optim.Cosine,
}
_OURS = {
    "beta_1": "beta1",
    "beta_2": "beta2",
    "beta_2_decay": "decay_exponent",
    "epsilon_1": "epsilon1",
    "epsilon_2": "epsilon2",
    "clip_threshold": "clip",
    "initial_accumulator_value": "initial_accumulator",
    "l1_regularization_strength": "l1",
    "l2_regularization_strength": "l2",
    "l2_shrinkage_regularization_strength": "l2_shrinkage",
    "initial_learning_rate": "initial",
    "end_learning_rate": "end",
}
_SLOTS = {
    "m": "momentum",
    "v": "velocity",
    "v_max": "velocity_hat",
    "u": "norm",
    "mean_square": "velocity",
    "mean_gradient": "average_gradient",
}
"""Ends of Keras's names for slots that have another name here."""


def _rule_of(name: str, options: dict[str, Any]) -> optim.Rule:
    rule: Any = _RULES[name]
    if name == "SGD" and not options["momentum"]:
        rule = optim.SGD()
    if name == "Adam" and (options["weight_decay"] or options["amsgrad"]):
        rule = _RULES["AdamW"]
    given = {n: 0.0 if v is None else v for n, v in options.items()}
    given["learning_rate"] = _rate_of(options["learning_rate"])
    if name in ("Lamb", "Adafactor"):
        del given["weight_decay"]  # which is another than the rule's
    if name == "Adafactor" and isinstance(options["learning_rate"], dict):
        given["relative_step"] = False  # a schedule is taken as it is
    return cast(optim.Rule, replace(rule, **options_of(rule, given, _OURS)))


def _rate_of(rate: Any) -> float | optim.Schedule:
    """Return a rate from Keras's config: a number, which went through float32, or a schedule."""
    if not isinstance(rate, dict):
        return float(str(np.float32(rate)))
    name, options = rate["class_name"], rate["config"]
    if name not in _SCHEDULES:
        expected = ", ".join(_SCHEDULES)
        raise _no_twin(f"the learning-rate schedule {name}", f"expected one of {expected}")
    target, steps = options.get("warmup_target"), options.get("warmup_steps")
    first = {} if target is None or not steps else {"initial": target}
    schedule = _SCHEDULES[name](**options_of(_SCHEDULES[name], options, _OURS) | first)
    return optim.Warmup(schedule, steps, options["initial_learning_rate"]) if first else schedule


def check_state(optimizer: Any, policy: str, fingerprint: Mapping[str, str]) -> optim.Update:
    """Return the update that a compiled optimizer computes, if a job has the state for it.

    Raises:
        ConfigError: the job has another optimizer, or an option that Keras's has not.
        CheckpointError: its state is not that of variables.
    """
    if make_policy(policy).most_local_steps or "tables" in fingerprint:
        raise CheckpointError("under local steps or with tables there is no state of variables")
    known = {"optimizer", "clip_norm", "clip_norm_each"} & fingerprint.keys()
    theirs, fields = {name: fingerprint[name] for name in known}, fields_of(optimizer)
    ours = {"clip_norm": str(fields.pop("clip_norm", ""))} if "clip_norm" in theirs else {}
    update = optim.Update(fields.pop("optimizer"), **fields)
    ours["optimizer"] = short(canonical(repr(update)))
    if text := fingerprint_difference(theirs, ours, "in training", "in the model"):
        raise ConfigError(text)
    return update


def give_state(model: Any, variables: Mapping[str, Any], checkpoint: Path) -> None:
    """Have the compiled optimizer of a model go on from a checkpoint.

    ``variables``: of the model, by their names there. One that was not trained there begins anew.

    Raises:
        ConfigError, CheckpointError: see :func:`check_state`; or the state cannot be read.
        TypeError: it has a learning rate, and the optimizer a schedule.
    """
    manifest, optimizer = read_manifest(checkpoint), model.optimizer
    update = check_state(optimizer, manifest.policy, manifest.fingerprint)
    values = {}
    for slot in {slot.name for slot in update.slots}:
        having = [one for one in manifest.variables() if one.name in manifest.tensors[slot]]
        values[slot] = read_parameters(checkpoint, manifest, having, slot=slot)
    if manifest.learning_rate is not None:
        optimizer.learning_rate = manifest.learning_rate
    optimizer.build(model.trainable_variables)
    optimizer.iterations.assign(manifest.version)
    names = {id(variable): name for name, variable in variables.items()}
    for slot, of_slot in values.items():
        end = f"_{_SLOTS.get(slot, slot)}"
        kept = [each for each in optimizer.variables if each.name.endswith(end)]
        for number, variable in enumerate(model.trainable_variables):
            if (value := of_slot.get(names[id(variable)])) is not None:
                kept[number].assign(value)
                if _name(optimizer) == "Adafactor" and value.ndim > 1:
                    optimizer._r[number].assign(value.mean(-1))
                    optimizer._c[number].assign(value.mean(-2))
    if _name(optimizer) == "Nadam":
        optimizer._u_product.assign(mu_product(optimizer.beta_1, 1.0, manifest.version))


def _name(optimizer: Any) -> str:
    return type(optimizer).__name__


def _no_twin(what: str, remedy: str) -> ConfigError:
    return ConfigError(
        f"{what} has no twin in zmqtrain.optim; {remedy}, or give the job an optimizer of its own"
    )
