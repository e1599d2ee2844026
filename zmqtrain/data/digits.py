"""Handwritten digits that are part of the package; ``digits.md`` names their source."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

import numpy as np

from zmqtrain.data.arrays import ArrayDataset, check_split, split

BRIGHTEST = 16  # on pixels of a 4 x 4 block


@dataclass(frozen=True, slots=True)
class Digits:
    """Data: 1797 handwritten digits of 8 x 8 pixels.

    Features are float32 (n, 64) in 0 .. 1, labels int64 (n,) in 0 .. 9. The fraction ``holdout``
    of them, chosen by ``seed``, is the evaluation set.
    """

    holdout: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        check_split(self.holdout, self.seed)

    def load(self, directory: str | None) -> tuple[ArrayDataset, ArrayDataset]:
        """Return both sets; ``directory`` is not used."""
        resource = files("zmqtrain.data") / "digits.npz"
        with resource.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            images, labels = archive["images"], archive["labels"]
        features = images.reshape(len(images), -1).astype(np.float32) / BRIGHTEST
        return split((features, labels.astype(np.int64)), self.holdout, self.seed)
