"""Steps of a model of any framework, for tests of one adapter."""

from __future__ import annotations

from typing import Any

import numpy as np

X = np.random.default_rng(0).normal(size=(12, 5)).astype(np.float32)
Y = np.arange(12) % 3
BATCH = (X, Y)


class Step:
    """A model over memory of its own, as a trainer has it."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.parameters = {n: v.copy() for n, v in model.parameters(0).items()}
        state = {n: v.copy() for n, v in model.state(0).items()}
        self.frozen = model.frozen(0)
        self.values: dict[str, Any] = self.parameters | state | self.frozen
        self.out: dict[str, Any] = {
            name: np.full_like(value, 77) for name, value in (self.parameters | state).items()
        }

    def __call__(self, batch: Any = BATCH, *, seed: tuple[int, int] = (0, 0)) -> float:
        self.model.seed_batch(*seed)
        return self.model.loss_and_gradients(self.values, batch, self.out)

    def gradients(self) -> dict[str, Any]:
        return {name: self.out[name].copy() for name in self.parameters}


def same(a: Any, b: Any, tolerance: float = 0.0) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        np.testing.assert_allclose(value, b[name], tolerance, tolerance, err_msg=name)
