"""The one kind of array that shards, gradients and updates are made of."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Flat: TypeAlias = NDArray[np.float32]
"""float32 of shape (n,), one behind the other; on a GPU the like of CuPy."""
