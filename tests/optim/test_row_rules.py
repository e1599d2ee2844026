"""RowwiseAdagrad against its formula in float64."""

from __future__ import annotations

import numpy as np
import pytest

from zmqtrain.errors import ConfigError
from zmqtrain.optim import RowwiseAdagrad, Update, new_slots
from zmqtrain.optim.schedules import Exponential


@pytest.mark.parametrize("dim", [1, 3, 16])
def test_rowwise_adagrad_is_its_formula(dim: int) -> None:
    rule = RowwiseAdagrad(Exponential(0.5, 10, 0.9), initial_accumulator=0.2, epsilon=1e-3)
    random, rows = np.random.default_rng(dim), 7
    w = random.standard_normal((rows, dim)).astype(np.float32)
    expected, a = w.astype(np.float64), np.full(rows, 0.2)
    flat, slots = w.ravel().copy(), {"accumulator": np.full(rows, 0.2, np.float32)}
    bound = Update(rule.of_rows(dim), l2=0.1)
    for step in range(5):
        gradient = random.standard_normal((rows, dim)).astype(np.float32)
        bound.update(flat, gradient.ravel(), slots, step)
        g = gradient + 0.1 * expected
        a += (g**2).mean(axis=1)
        expected -= 0.5 * 0.9 ** (step / 10) / (np.sqrt(a) + 1e-3)[:, None] * g
    np.testing.assert_allclose(flat, expected.ravel(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(slots["accumulator"], a, rtol=1e-5)


def test_row_without_a_gradient_keeps_its_place_with_any_accumulator() -> None:
    flat = np.ones(4, np.float32)
    slots = {"accumulator": np.zeros(2, np.float32)}
    RowwiseAdagrad(0.1).of_rows(2).update(flat, np.zeros(4, np.float32), slots, 0)
    assert (flat == 1).all()


def test_slot_of_a_row_is_one_element() -> None:
    (slot,) = RowwiseAdagrad(0.1).slots
    assert (slot.name, slot.initial, slot.by_row) == ("accumulator", 0.0, True)


def test_rows_that_are_too_long_are_refused() -> None:
    with pytest.raises(ConfigError, match="a row has 65537 elements; expected at most 65536"):
        RowwiseAdagrad(0.1).of_rows(65_537)


def test_rule_for_rows_is_refused_where_there_are_none() -> None:
    w = np.zeros(3, np.float32)
    with pytest.raises(ConfigError, match=r"a rule for rows of tables; expected .* Adagrad"):
        RowwiseAdagrad(0.1).update(w, w, new_slots(RowwiseAdagrad(0.1), w), 0)
