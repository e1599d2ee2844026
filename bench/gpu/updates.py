"""Speed of updates on a device, beside torch's optimizer if it has the rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from bench.gpu.cases import TORCH_DEVICES, Case, arrays_on, medians_s, text_of
from bench.jobs import RULES
from bench.kernels import TORCH, arrays_of, our_step, torch_step
from bench.workload import items_of
from zmqtrain.optim import Update

MEASURED = ("sgd", "momentum", "adagrad", "rmsprop", "adam", "adamw", "ftrl", "lion")
IN_ROW = 10  # updates of one measurement, so that waiting for the device is a small part of it


def cases(device: str, megabytes: str) -> Iterator[Case]:
    """Yield that of a copy within the device, and of each rule."""
    xp, wait = arrays_on(device)
    size = items_of(float(megabytes))
    source, target = xp.zeros(size, np.float32), xp.ones(size, np.float32)
    copy_s = medians_s({"": partial(_in_row, partial(xp.copyto, target, source), wait)})[""]
    copied = 2 * target.nbytes / 1e9 / (copy_s / IN_ROW)
    yield {"rule": "a copy"}, lambda: {"memory_gb_per_second": copied}
    for rule in MEASURED:
        yield {"rule": rule}, partial(_update, rule, size, device, copied)


def _update(rule: str, size: int, device: str, copied: float) -> dict[str, Any]:
    """Return a row; its bytes of memory are those that an update must read and write."""
    xp, wait = arrays_on(device)
    parameters, gradient = map(xp.asarray, arrays_of(size))
    update = Update(RULES[rule])
    ours = our_step(update, parameters, gradient)
    steps: dict[str, Callable[[], object]] = {"ours": ours}
    notes = {}
    for way in TORCH[rule][2] if rule in TORCH else ():
        try:
            step = torch_step(rule, way, size, TORCH_DEVICES[device])
            step()
            steps[way] = step
        except (ImportError, RuntimeError) as error:  # not installed, or not for this device
            notes[f"torch_{way}"] = text_of(error)
    times = medians_s({name: partial(_in_row, step, wait) for name, step in steps.items()})
    seconds = {name: each / IN_ROW for name, each in times.items()}
    moved = (3 + 2 * len(update.slots)) * parameters.nbytes / 1e9 / seconds["ours"]
    return {
        "ms": 1e3 * seconds["ours"],
        "alone_ms": 1e3 * medians_s({"": partial(_in_row, ours, wait, 1)})[""],
        "gb_per_second": parameters.nbytes / 1e9 / seconds["ours"],
        "memory_gb_per_second": moved,
        "percent_of_copy": 100 * moved / copied,
        **{f"torch_{way}_ms": 1e3 * seconds[way] for way in seconds if way != "ours"},
        **notes,
    }


def _in_row(step: Callable[[], object], wait: Callable[[], object], times: int = IN_ROW) -> None:
    for _ in range(times):
        step()
    wait()
