"""The process-wide random generators of Python, NumPy and torch."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np


@contextmanager
def generators_kept() -> Iterator[None]:
    """Leave the generators at the end of the block as they were before it.

    Training seeds them for each batch; the caller's next random numbers must not depend on that.
    """
    states = random.getstate(), np.random.get_state()
    torch = sys.modules.get("torch")
    if torch is not None:
        on_cpu = torch.random.get_rng_state()
        on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        if torch is not None:
            torch.random.set_rng_state(on_cpu)
            if on_gpus is not None:
                torch.cuda.set_rng_state_all(on_gpus)


def seed_generators(*seed: int) -> None:
    """Seed the generators; torch's is that of the CPU."""
    one, two = np.random.SeedSequence(seed).generate_state(2).tolist()
    random.seed(one)
    np.random.seed(two)
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(one << 32 | two)
