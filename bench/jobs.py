"""Jobs of the benchmarks, with descriptions from which other processes make the same ones.

Also a job that only moves bytes, whose gradient costs nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from importlib import import_module
from itertools import pairwise
from typing import Any

import numpy as np

from bench.workload import items_of
from zmqtrain import Job, optim
from zmqtrain.data import Arrays
from zmqtrain.models.base import Model, written

# For parameters that stand for nothing: they move, but not far.
RULES: dict[str, optim.Rule] = {
    "sgd": optim.SGD(1e-6),
    "momentum": optim.Momentum(1e-6),
    "adagrad": optim.Adagrad(1e-6),
    "rmsprop": optim.RMSProp(1e-6),
    "adam": optim.Adam(1e-6),
    "ftrl": optim.Ftrl(1.0),
    "adamw": optim.AdamW(1e-6),
    "lion": optim.Lion(1e-6),
    "lamb": optim.LAMB(1e-6),
    "adafactor": optim.Adafactor(1e-6),
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


class Blob:
    """Parameters of this many megabytes in all, cut into ``parts``, moved in a mode of
    `bench.workload`.

    Remembers when each step began, and calls ``on_step`` with its number. With ``compute_ms`` a
    gradient takes so long, as on a GPU: nothing is computed here. Its last part is complete first.
    """

    def __init__(
        self, megabytes: float, mode: str, parts: int = 1, compute_ms: float | None = None
    ) -> None:
        self.size, self.mode, self.parts = items_of(megabytes), mode, parts
        self.began_at: list[float] = []
        self._part_s = (compute_ms or 0.0) / parts / 1e3
        self.on_step: Callable[[int], object] = lambda step: None
        self._sources: dict[str, Any] = {}  # beside parameters and gradients, wherever these lie
        self._sinks: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"Blob({self.size}, {self.parts})"

    def parameters(self, seed: int) -> dict[str, Any]:
        cuts = [self.size * index // self.parts for index in range(self.parts + 1)]
        sizes = [stop - start for start, stop in pairwise(cuts)]
        return {f"part {i}": np.zeros(size, np.float32) for i, size in enumerate(sizes) if size}

    def loss_and_gradients(self, parameters: Any, batch: Any, out: Any) -> float:
        self.began_at.append(time.perf_counter())
        self.on_step(len(self.began_at))
        if self.mode == "touched" and not self._sinks:
            self._sources = {name: np.full_like(value, 1e-3) for name, value in out.items()}
            self._sinks = {name: np.empty_like(value) for name, value in parameters.items()}
        for name, source in self._sources.items():
            self._sinks[name][...] = parameters[name]
            out[name][...] = source
        if len(self.began_at) == 1:
            for name, gradient in out.items():
                gradient.fill(1e-3)
                parameters[name].max()
        for name in reversed(list(out)) if self._part_s else ():
            time.sleep(self._part_s)
            written(out, name)
        return 0.0

    def metrics(self, parameters: Any, batch: Any) -> dict[str, float]:
        return {"loss": 0.0}


def blob_job(
    megabytes: float, steps: int, rule: str, mode: str = "in_place", parts: int = 1, **fields: str
) -> Job:
    """Return the job that moves ``megabytes``, in ``parts``, in each direction ``steps`` times."""
    return dataless_job(
        Blob(megabytes, mode, parts),
        steps,
        optimizer=RULES[rule],
        prefetch=0,
        partition_nbytes=256 * 1024,
        **fields,
    )
