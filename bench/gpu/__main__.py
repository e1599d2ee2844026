"""Measures one part of `bench gpu`, or one row of it, in a process of its own.

`python -m bench.gpu PART ...` prints a JSON object for each row.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from bench.gpu import copies, suite, training, updates
from bench.gpu.cases import Case, print_rows


def suite_cases(seconds: str, log: str) -> Iterable[Case]:
    return [({}, partial(suite.run, float(seconds), Path(log)))]


def updates_cases(device: str, megabytes: str) -> Iterable[Case]:
    return updates.cases(device, float(megabytes))


def training_cases(model: str, side: str, steps: str, device: str) -> Iterable[Case]:
    measure = partial(training.measure, model, side, int(steps), device)
    return [({"model": model, "side": side}, measure)]


PARTS: dict[str, Callable[..., Iterable[Case]]] = {
    "suite": suite_cases,
    "copies": copies.cases,
    "updates": updates_cases,
    "training": training_cases,
}

if __name__ == "__main__":
    print_rows(PARTS[sys.argv[1]](*sys.argv[2:]))
