"""Whether all elements of a gradient are finite, looked at alone or by several threads."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from zmqtrain.compute.arrays import BLOCK_SIZE
from zmqtrain.compute.threads import ThreadTeam
from zmqtrain.store.finite import LARGE, all_finite

crews = pytest.mark.parametrize("team", [None, ThreadTeam(2)], ids=["alone", "two threads"])


@crews
@pytest.mark.parametrize("size", [0, 1, 7, 64, 2 * BLOCK_SIZE + 3, LARGE + 1])
def test_finite_gradient_is_finite_whatever_its_squares_are(
    size: int, team: ThreadTeam | None
) -> None:
    assert all_finite(np.full(size, -1.5, np.float32), team)
    assert all_finite(np.full(size, 3e38, np.float32), team)


@crews
@pytest.mark.parametrize("size", [1, 7, 64, 2 * BLOCK_SIZE + 3, LARGE + 1])
def test_one_bad_element_anywhere_is_found(size: int, team: ThreadTeam | None) -> None:
    for background, bad in product((0.0, 3e38), (np.nan, np.inf, -np.inf)):
        flat = np.full(size, background, np.float32)
        for position in {0, size // 2, size - 1, max(0, size - BLOCK_SIZE)}:
            flat[position] = bad
            assert not all_finite(flat, team), (position, bad)
            flat[position] = background
