"""Speed of updates in memory: our kernels, the NumPy rules, and torch's optimizers.

Backend "crash-safe" is a ps's whole update by the same kernel, with all that lets the next process
finish it.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import click
import numpy as np

from bench.jobs import RULES
from bench.options import json_option, sizes_type
from bench.output import report
from bench.workload import items_of
from zmqtrain.compute.device import load_cupy
from zmqtrain.errors import ConfigError
from zmqtrain.optim import Mean, Update, new_slots
from zmqtrain.protocol.orders import Apply
from zmqtrain.store.layout import Variable
from zmqtrain.store.placement import place
from zmqtrain.store.shard import Shard

# Class, arguments and ways of running of torch's optimizer, where it has the rule.
TORCH: dict[str, tuple[str, dict[str, float], tuple[str, ...]]] = {
    "sgd": ("SGD", {}, ("fused", "foreach")),
    "momentum": ("SGD", {"momentum": 0.9}, ("fused", "foreach")),
    "adagrad": ("Adagrad", {}, ("fused", "foreach")),
    "rmsprop": ("RMSprop", {}, ("foreach",)),
    "adam": ("Adam", {}, ("fused", "foreach")),
    "adamw": ("AdamW", {}, ("fused", "foreach")),
}

WARM_UP = 2  # rounds not counted


def measure(rule: str, megabytes: float) -> list[dict[str, Any]]:
    """Return one row for each backend that is installed. All run on one core, taking turns.

    ``gb_per_second`` is the median over the updates, in bytes of parameters.
    """
    nbytes = megabytes * 1e6
    steps = _steps(rule, items_of(megabytes))
    seconds: dict[str, list[float]] = {backend: [] for backend in steps}
    for _ in range(WARM_UP + min(200, max(15, int(2e9 / nbytes)))):
        for backend, step in steps.items():
            started = time.perf_counter()
            step()
            seconds[backend].append(time.perf_counter() - started)
    return [
        {
            "bench": "kernels",
            "rule": rule,
            "backend": backend,
            "megabytes": megabytes,
            "gb_per_second": nbytes / 1e9 / statistics.median(times[WARM_UP:]),
            "best_gb_per_second": nbytes / 1e9 / min(times[WARM_UP:]),
        }
        for backend, times in seconds.items()
    ]


def _steps(rule: str, size: int) -> dict[str, Callable[[], object]]:
    steps: dict[str, Callable[[], object]] = {
        "compiled": our_step(Update(RULES[rule]), *arrays_of(size)),
        "crash-safe": _crash_safe_step(Update(RULES[rule]), size),
        "numpy": our_step(Update(RULES[rule], fused=False), *arrays_of(size)),
    }
    with contextlib.suppress(ConfigError):
        cupy = load_cupy("--device")
        on_gpu, gradient = map(cupy.asarray, arrays_of(size))
        wait = cupy.cuda.get_current_stream().synchronize
        steps["cupy"] = our_step(Update(RULES[rule]), on_gpu, gradient, wait)
    with contextlib.suppress(ImportError):
        for way in TORCH[rule][2] if rule in TORCH else ():
            steps[f"torch {way}"] = torch_step(rule, way, size)
    return steps


def times(rule: str, megabytes: float, cores: int, steps: int) -> list[float]:
    """Return when updates began, of which each core makes its share; the last is the end."""
    share = -(-items_of(megabytes) // cores)
    shares = [our_step(Update(RULES[rule]), *arrays_of(share)) for _ in range(cores)]
    began_at = []
    with ThreadPoolExecutor(cores) as threads:
        for _ in range(steps + 1):
            began_at.append(time.perf_counter())
            for made in [threads.submit(step) for step in shares]:
                made.result()
    return began_at


def our_step(
    update: Update, parameters: Any, gradient: Any, wait: Callable[[], object] = lambda: None
) -> Callable[[], None]:
    """Return an update of these arrays, bound once as by a ps; ``wait`` returns when it is done."""
    bound = update.bind(parameters, new_slots(update, parameters))
    mean = Mean([gradient])

    def step() -> None:
        bound.apply(mean, 10)
        wait()

    return step


def _crash_safe_step(update: Update, size: int) -> Callable[[], None]:
    (layout,) = place([Variable("w", (size,))], 1, partition_nbytes=4 * size)
    shard = Shard(layout, update, safe=True)
    parameters, gradient = arrays_of(size)
    shard.initialize(parameters)
    shard.segment.gradient(0)[:] = gradient
    shard.stage(0, 0)

    def step() -> None:
        shard.carry_out(Apply(0))

    return step


def torch_step(rule: str, way: str, size: int, device: str = "cpu") -> Callable[[], object]:
    """Return a step of torch's optimizer, on a device by torch's name."""
    import torch

    torch.set_num_threads(1)
    name, arguments, _ = TORCH[rule]
    parameters, gradient = (torch.from_numpy(array).to(device) for array in arrays_of(size))
    parameters.requires_grad_()
    parameters.grad = gradient
    optimizer = getattr(torch.optim, name)([parameters], lr=1e-6, **arguments, **{way: True})
    step: Callable[[], object] = optimizer.step
    return step


def arrays_of(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return new parameters and a new gradient, always with the same values."""
    parameters, gradient = _normal(size)
    return parameters.copy(), gradient.copy()


@lru_cache(1)
def _normal(size: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.standard_normal(size, np.float32), rng.standard_normal(size, np.float32)


@click.command("kernels")
@click.option("--rule", type=click.Choice(list(RULES)), default="adam")
@click.option("--megabytes", "sizes", type=sizes_type, default="1,13,100")
@json_option
def kernels_command(rule: str, sizes: tuple[float, ...], as_json: bool) -> None:
    """Time one update on one core, in gigabytes of parameters a second.

    \b
    Examples:
      python -m bench kernels
      python -m bench kernels --rule sgd --megabytes 100 --json
    """
    report((row for megabytes in sizes for row in measure(rule, megabytes)), as_json=as_json)
