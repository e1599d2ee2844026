"""Rows that were never trained: the same in every process, compiled or not."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from zmqtrain.errors import ConfigError
from zmqtrain.models.tables import Given, Normal, Uniform, key_of
from zmqtrain.optim.kernels.random import initial_rows

IDS = np.array([-(2**63), -1, 0, 1, 2, 2**40, 2**63 - 1])
KEY = key_of(7, "user")
WORDS = 2**64


def word(id_: int, place: int) -> int:
    """Return a random word of a row, in whole numbers of Python."""

    def finalised(number: int) -> int:
        number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 % WORDS
        number = (number ^ number >> 27) * 0x94D049BB133111EB % WORDS
        return number ^ number >> 31

    begin = finalised(id_ % WORDS ^ KEY)
    return finalised((begin + (place + 1) * 0x9E3779B97F4A7C15) % WORDS)


def uniform(id_: int, element: int) -> np.float32:
    top = np.float32(word(id_, element) >> 40)
    return (top * np.float32(2**-23) - np.float32(1)) * np.float32(0.3)


def normal(id_: int, element: int) -> np.float32:
    words = [word(id_, 3 * element + place) for place in range(3)]
    parts = [number >> shift & 0xFFFF for number in words for shift in (0, 16, 32, 48)]
    return np.float32(sum(parts) - 12 * 65535 // 2) * np.float32(2.0 / 2**16)


INITIALS = pytest.mark.parametrize(
    ("initial", "element", "std"),
    [(Uniform(0.3), uniform, 0.3 / 3**0.5), (Normal(2.0), normal, 2.0)],
    ids=["uniform", "normal"],
)


@INITIALS
@pytest.mark.parametrize("dim", [1, 5, 16])
def test_initial_rows_follow_from_key_and_id_alone(initial, element, std, dim: int) -> None:
    expected = [[element(id_, place) for place in range(dim)] for id_ in IDS.tolist()]
    for rows in (initial.rows, partial(initial_rows, initial)):  # by NumPy, and compiled
        np.testing.assert_array_equal(rows(KEY, IDS, dim), np.array(expected, np.float32))
        np.testing.assert_array_equal(rows(KEY, IDS[::2], dim), expected[::2])
        assert rows(KEY, IDS[:0], dim).shape == (0, dim)


@INITIALS
def test_initial_rows_have_the_mean_and_deviation_that_they_say(initial, element, std) -> None:
    rows = initial.rows(KEY, np.arange(20_000), 8)
    assert abs(rows.mean()) < 0.02 * std
    assert abs(rows.std() / std - 1) < 0.02


def test_given_rows_are_those_of_the_array() -> None:
    array = np.arange(12, dtype=np.float32).reshape(4, 3)
    found = initial_rows(Given(array), KEY, np.array([2, 0]), 3)
    np.testing.assert_array_equal(found, array[[2, 0]])


@pytest.mark.parametrize("value", [-1.0, np.nan, np.inf, "0.05", None, True])
@pytest.mark.parametrize("kind", [Uniform, Normal])
def test_impossible_scale_is_refused(kind, value) -> None:
    with pytest.raises(ConfigError, match="expected a finite number of at least 0"):
        kind(value)
