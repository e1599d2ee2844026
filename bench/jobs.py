"""What the jobs of the benchmarks have in common, and how other processes make the same ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

import numpy as np

from zmqtrain import Job
from zmqtrain.data import Arrays
from zmqtrain.models.base import Model
from zmqtrain.optim import (
    LAMB,
    SGD,
    Adafactor,
    Adagrad,
    Adam,
    AdamW,
    Ftrl,
    Lion,
    Momentum,
    RMSProp,
    Rule,
)

# For parameters that stand for nothing: they move, but not far.
RULES: dict[str, Rule] = {
    "sgd": SGD(1e-6),
    "momentum": Momentum(1e-6),
    "adagrad": Adagrad(1e-6),
    "rmsprop": RMSProp(1e-6),
    "adam": Adam(1e-6),
    "ftrl": Ftrl(1.0),
    "adamw": AdamW(1e-6),
    "lion": Lion(1e-6),
    "lamb": LAMB(1e-6),
    "adafactor": Adafactor(1e-6),
}
USUAL_RULES = ("sgd", "adam")


def dataless_job(model: Model, steps: int, **fields: Any) -> Job:
    """Return a job whose model looks at no example."""
    examples = (np.zeros((64, 1), np.float32),)
    return Job(model=model, data=Arrays(examples, examples), batch_size=1, steps=steps, **fields)


def variables_of(arguments: Mapping[str, object]) -> dict[str, str]:
    """Return the variables from which :func:`made_from_variables` reads these arguments."""
    return {_variable(name): str(value) for name, value in arguments.items()}


def made_from_variables(make: Callable[..., Job]) -> Job:
    """Call a function whose parameters are texts and numbers with what the variables say."""
    types = get_type_hints(make)
    del types["return"]
    return make(**{name: of_type(os.environ[_variable(name)]) for name, of_type in types.items()})


def _variable(name: str) -> str:
    return f"BENCH_{name.upper()}"
