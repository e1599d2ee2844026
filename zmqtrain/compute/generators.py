"""The process-wide random generators of Python, NumPy and torch."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np


@contextmanager
def generators_kept(*, all_gpus: bool = False) -> Iterator[None]:
    """Leave the generators at the end of the block as they were before it.

    Training seeds them for each batch; the caller's next random numbers must not depend on that.
    ``all_gpus``: those of all GPUs, if this process uses any, instead of the current one's. To ask
    a GPU takes memory on it, so this is for processes of the user's own.
    """
    states = random.getstate(), np.random.get_state()
    torch = sys.modules.get("torch")
    try:
        with nullcontext() if torch is None else _kept_of_torch(torch, all_gpus):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _kept_of_torch(torch: Any, all_gpus: bool) -> Any:
    if not torch.cuda.is_initialized():
        return torch.random.fork_rng(devices=[])
    gpus = range(torch.cuda.device_count()) if all_gpus else [torch.cuda.current_device()]
    return torch.random.fork_rng(devices=[*gpus])


def seed_generators(*seed: int) -> None:
    """Seed the generators; torch's is that of the CPU."""
    one, two = np.random.SeedSequence(seed).generate_state(2).tolist()
    random.seed(one)
    np.random.seed(two)
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(one << 32 | two)
