"""Jobs whose inner optimizer is one of a framework, on data of three classes."""

from __future__ import annotations

from typing import Any

import numpy as np

from zmqtrain import Job

drawn = np.random.default_rng(0)
ROWS = drawn.standard_normal((40, 5)).astype(np.float32)
CLASSES = drawn.integers(0, 3, 40)


def job_with(model: Any, inner: Any, **fields: Any) -> Job:
    """Return a job of 12 steps, in rounds of 5, that trains a model by an inner optimizer."""
    defaults: dict[str, Any] = {
        "model": model,
        "data": (ROWS, CLASSES),
        "batch_size": 8,
        "steps": 12,
        "policy": "local-steps:5",
        "inner": inner,
    }
    return Job(**defaults | fields)
