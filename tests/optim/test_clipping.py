"""The global norm and clipping by it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqtrain.optim import SGD, Update, clip_by_global_norm, global_norm
from zmqtrain.optim.norm import clip_scale, square_of


def three_four() -> dict[str, Any]:
    return {
        "weights": np.array([[3.0, 0.0], [0.0, 0.0]], np.float32),
        "bias": np.array(4.0, np.float32),
    }


class DeviceArray:
    """Has what NumPy's and CuPy's arrays share, and cannot be turned into either."""

    def __init__(self, values: Any) -> None:
        self._values = np.asarray(values)
        self.size = self._values.size

    def reshape(self, shape: int) -> DeviceArray:
        return DeviceArray(self._values.reshape(shape))

    def astype(self, dtype: Any) -> DeviceArray:
        return DeviceArray(self._values.astype(dtype))

    def sum(self) -> Any:
        return self._values.sum()

    def __getitem__(self, run: slice) -> DeviceArray:
        return DeviceArray(self._values[run])

    def __imul__(self, other: Any) -> DeviceArray:
        self._values *= other._values if isinstance(other, DeviceArray) else other
        return self

    def tolist(self) -> list[float]:
        return self._values.tolist()


def test_norm_of_nothing_is_zero() -> None:
    assert global_norm({}) == 0.0
    assert clip_by_global_norm({}, 1.0) == 0.0


def test_norm_of_many_elements_is_added_in_double_precision() -> None:
    gradient = np.full(3_000_001, 0.1, np.float32)
    expected = float(np.float32(0.1)) * np.sqrt(3_000_001)
    assert global_norm({"w": gradient}) == pytest.approx(expected, rel=1e-12)


def test_longer_gradient_is_scaled_to_the_norm_in_place() -> None:
    gradients = three_four()
    weights = gradients["weights"]
    assert clip_by_global_norm(gradients, 2.5) == 5.0
    assert gradients["weights"] is weights
    np.testing.assert_array_equal(weights, [[1.5, 0.0], [0.0, 0.0]])
    assert gradients["bias"] == 2.0
    assert weights.dtype == np.float32


@pytest.mark.parametrize("norm", [5.0, 5.1, 1e9])
def test_gradient_no_longer_than_the_norm_keeps_its_bits(norm: float) -> None:
    gradients = three_four()
    assert clip_by_global_norm(gradients, norm) == 5.0
    assert gradients["weights"].tobytes() == three_four()["weights"].tobytes()


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_non_finite_gradient_is_left_as_it_came(poison: float) -> None:
    gradients = three_four()
    gradients["weights"][1, 1] = poison
    before = gradients["weights"].tobytes()
    assert not np.isfinite(clip_by_global_norm(gradients, 1.0))
    assert gradients["weights"].tobytes() == before
    assert gradients["bias"] == 4.0


def test_gradient_whose_squares_overflow_float32_is_clipped() -> None:
    gradients = {"w": np.array([3e30, -4e30], np.float32)}
    assert clip_by_global_norm(gradients, 1.0) == pytest.approx(5e30)
    np.testing.assert_allclose(gradients["w"], [0.6, -0.8], rtol=1e-6)


@given(
    values=st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=20),
    norm=st.floats(1e-3, 1e6),
)
def test_clipped_gradient_is_never_longer_and_keeps_its_direction(
    values: list[float], norm: float
) -> None:
    original = np.array(values, np.float32)
    gradients = {"w": original.copy()}
    length = clip_by_global_norm(gradients, norm)
    assert global_norm(gradients) <= norm * (1 + 1e-6) or length <= norm
    scale = norm / max(norm, length)
    np.testing.assert_allclose(gradients["w"], original * scale, rtol=1e-6, atol=1e-37)


def test_arrays_of_a_device_are_clipped_by_their_own_operations() -> None:
    gradients = {"w": DeviceArray(np.array([[3.0, 4.0]], np.float32))}
    assert clip_by_global_norm(gradients, 1.0) == 5.0
    assert gradients["w"].tolist() == [[pytest.approx(0.6), pytest.approx(0.8)]]


@pytest.mark.gpu
def test_cupy_gradients_are_clipped_where_they_lie() -> None:
    cupy = pytest.importorskip("cupy")
    if not cupy.is_available():
        pytest.skip("no CUDA device")
    gradients = {name: cupy.asarray(value) for name, value in three_four().items()}
    assert clip_by_global_norm(gradients, 2.5) == 5.0
    assert gradients["weights"].get().tolist() == [[1.5, 0.0], [0.0, 0.0]]
    assert gradients["bias"].get() == 2.0


@given(
    seed=st.integers(0, 99),
    spread=st.sampled_from([0, 8, 40]),
    limit=st.sampled_from([1e-30, 0.01, 1.0, 1e30]),
    cuts=st.lists(st.integers(0, 9999), max_size=5),
)
def test_square_is_that_of_its_parts_in_any_order(
    seed: int, spread: int, limit: float, cuts: list[int]
) -> None:
    random = np.random.default_rng(seed)
    gradient = np.exp2(random.normal(0, spread, 9999)).clip(0, 3e38).astype(np.float32)
    whole = square_of(gradient, limit)
    assert sum(square_of(part, limit) for part in np.split(gradient, sorted(cuts))) == whole
    assert square_of(random.permutation(gradient), limit) == whole
    in_numpy = np.empty((9999, 2), np.float32)
    in_numpy[:, 0] = gradient
    assert square_of(in_numpy[:, 0], limit) == whole


@pytest.mark.parametrize("limit", [1e-3, 1.0, 1e5])
def test_scale_makes_of_a_norm_its_limit(limit: float) -> None:
    for length in (1e-30, 0.99, 1.0, 3.0, 1e6, 1e30):
        gradient = np.full(5000, length * limit / np.sqrt(5000), np.float32)
        norm = float(np.linalg.norm(gradient.astype(np.float64)))
        scale = clip_scale(float(square_of(gradient, limit)), limit)
        assert scale == pytest.approx(min(1.0, limit / norm), rel=1e-9), length


def test_infinite_element_counts_as_the_largest_one() -> None:
    gradient = np.array([np.inf, 1, np.nan], np.float32)
    largest = np.array([np.finfo(np.float32).max, 1, 0], np.float32)
    assert square_of(gradient, 1.0) == square_of(largest, 1.0)


def test_update_clips_the_gradient_that_it_is_given() -> None:
    for options, expected in (({"clip_norm": 2.5}, [-1.5, 2.0]), ({"clip_value": 3.5}, [-3, 3.5])):
        parameters = np.zeros(2, np.float32)
        Update(SGD(1.0), **options).update(parameters, np.float32([3, -4]), {}, 0)
        assert parameters.tolist() == expected
