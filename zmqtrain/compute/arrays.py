"""The array type of shards, gradients and updates."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Flat: TypeAlias = NDArray[np.float32]
"""A contiguous float32 array of shape (n,), of NumPy or, on a GPU, of CuPy."""
