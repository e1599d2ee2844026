"""Synthetic data with a known answer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zmqtrain.data.arrays import ArrayDataset, check_seed
from zmqtrain.errors import ConfigError


@dataclass(frozen=True, slots=True)
class NoisyLine:
    """Data on the line y = ``slope`` * x + ``intercept``, plus normal noise.

    x is uniform in -1 .. 1, ``noise`` is the standard deviation. There are ``examples`` points
    for training and a fifth of that number, rounded up, for evaluation. Features and targets
    are float32 (n, 1). The best loss (mean squared error) is ``noise`` squared.
    """

    slope: float = 2.0
    intercept: float = 0.0
    noise: float = 0.1
    examples: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)
        if self.examples < 1 or self.noise < 0:
            raise ConfigError(
                f"NoisyLine: examples is {self.examples} and noise is {self.noise}; expected "
                "examples >= 1 and noise >= 0; correct them in the job"
            )

    def load(self, directory: str | None) -> tuple[ArrayDataset, ArrayDataset]:
        """Return both sets; ``directory`` is not used."""
        random = np.random.Generator(np.random.PCG64(self.seed))
        return self._points(self.examples, random), self._points(-(-self.examples // 5), random)

    def _points(self, count: int, random: np.random.Generator) -> ArrayDataset:
        x = random.uniform(-1, 1, (count, 1))
        y = self.slope * x + self.intercept + random.normal(0, self.noise, (count, 1))
        return ArrayDataset(x.astype(np.float32), y.astype(np.float32))
