"""What the jobs of the benchmarks have in common, and how other processes make the same ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from typing import Any

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

REFERENCE, VARIABLE = "bench.job", "BENCH_JOB"


def dataless_job(model: Model, steps: int, **fields: Any) -> Job:
    """Return a job whose model looks at no example."""
    examples = (np.zeros((64, 1), np.float32),)
    return Job(model=model, data=Arrays(examples, examples), batch_size=1, steps=steps, **fields)


def description(make: Callable[..., Job], **arguments: object) -> str:
    """Return the text from which :func:`job_of` makes the job of these texts and numbers."""
    return json.dumps([make.__module__, make.__name__, arguments])


def job_of(text: str) -> Job:
    """Return the job of a :func:`description`."""
    module, name, arguments = json.loads(text)
    job: Job = getattr(import_module(module), name)(**arguments)
    return job
