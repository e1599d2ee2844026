"""Compiled look-ups: what np.unique, indexing and a sum in the order of the batch give."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from zmqtrain.optim.kernels.look_ups import Column, LookUps

EXTREMES = (0, -1, 2**63 - 1, -(2**63))


def column(ids: NDArray[np.int64]) -> Column:
    return ids.ctypes.data, len(ids), ids.strides[0] // 8


@st.composite
def batches(draw: st.DrawFn) -> NDArray[np.int64]:
    """Ids of shape (rows, columns), many of them equal."""
    shape = draw(st.tuples(st.integers(0, 40), st.integers(1, 4)))
    spread = draw(st.sampled_from([1, 7, 300, 2**20, 2**62]))
    random = np.random.default_rng(draw(st.integers(0, 1000)))
    ids = random.integers(-spread, spread, shape)
    ids[random.random(shape) < 0.1] = draw(st.sampled_from(EXTREMES))
    return ids


@settings(max_examples=100)
@given(ids=batches())
def test_columns_are_sorted_as_by_numpy(ids: NDArray[np.int64]) -> None:
    found = LookUps([column(own) for own in ids.T])
    for number, own in enumerate(ids.T):
        unique, places = np.unique(own, return_inverse=True)
        np.testing.assert_array_equal(found.unique[number], unique)
        np.testing.assert_array_equal(found.places(number), places)
        assert found.size(number) == len(own)
        assert found.is_of(number, column(own.copy()))
        assert not found.is_of(number, column(np.append(own, 0)))
        if len(own):
            other = own.copy()
            other[-1] ^= 1
            assert not found.is_of(number, column(other))


@pytest.mark.parametrize("dim", [1, 5, 16])
def test_gradients_of_equal_ids_are_added_up_in_their_order(dim: int) -> None:
    random = np.random.default_rng(dim)
    ids = random.integers(0, 9, (50, 3))
    look_ups = LookUps([column(own) for own in ids.T])
    gradient = random.standard_normal((50, 3 * dim + 2)).astype(np.float32) * 10.0**dim
    gradient[::4] = -0.0
    parts = [gradient[:, number * dim : (number + 1) * dim] for number in range(3)]
    where = [(n, dim, part.ctypes.data, gradient.shape[1]) for n, part in enumerate(parts)]
    for number, total in enumerate(look_ups.add_up(where)):
        expected = np.zeros_like(total)
        np.add.at(expected, look_ups.places(number), parts[number])
        assert total.tobytes() == expected.tobytes()


def test_each_id_gets_its_row() -> None:
    random = np.random.default_rng(0)
    ids = random.integers(0, 20, (30, 2))
    look_ups = LookUps([column(own) for own in ids.T])
    dims = (3, 16)
    rows = [random.standard_normal((len(look_ups.unique[n]), dims[n]), np.float32) for n in (0, 1)]
    out = [np.empty((30, dim), np.float32) for dim in dims]
    look_ups.expand([1, 0], rows[::-1], [array.ctypes.data for array in out[::-1]])
    for number in (0, 1):
        np.testing.assert_array_equal(out[number], rows[number][look_ups.places(number)])
