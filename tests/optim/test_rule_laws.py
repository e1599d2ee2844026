"""Laws that every rule keeps; a new rule joins by one row in RULES."""

from __future__ import annotations

import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.optim.runs import Run
from zmqtrain.compute.arrays import BLOCK_SIZE
from zmqtrain.optim import (
    SGD,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Cosine,
    Exponential,
    Ftrl,
    InverseTime,
    Lion,
    Momentum,
    NAdam,
    RAdam,
    RMSProp,
    Rule,
    Update,
    new_slots,
)

RULES: list[Rule] = [
    SGD(0.1),
    Momentum(0.05),
    Momentum(0.05, nesterov=True),
    Momentum(0.05, scaled_velocity=True),
    Momentum(InverseTime(0.05, 100, 0.1), nesterov=True, scaled_velocity=True),
    Adagrad(1.0),
    Adagrad(1.0, initial_accumulator=0.0, epsilon=1e-7, epsilon_inside_sqrt=True),
    RMSProp(Cosine(0.1, 400, alpha=0.01)),
    RMSProp(Cosine(0.05, 400, alpha=0.01), momentum=0.5, epsilon_inside_sqrt=False),
    RMSProp(Exponential(0.1, 20, 0.7), centered=True, epsilon=1e-3),
    Adam(0.1),
    Adam(Cosine(0.1, 400, alpha=0.01), nesterov=True),
    Ftrl(1.0),
    AdamW(0.1),
    AdamW(0.1, weight_decay=0.0, amsgrad=True),
    NAdam(0.1),
    NAdam(Cosine(0.1, 400, alpha=0.01), momentum_decay=1.0, weight_decay=1e-3),
    RAdam(0.1),
    RAdam(0.1, beta2=0.9, weight_decay=1e-3),
    Adamax(0.1),
    Adamax(0.1, epsilon_in_max=False),
    Momentum(0.05, dampening=0.5),
    RMSProp.torch(Cosine(0.1, 400, alpha=0.01), momentum=0.5),
    Adagrad.torch(1.0),
    Lion(Cosine(0.1, 400, alpha=0.001)),
    Ftrl(1.0, learning_rate_power=-0.3, l1=1e-3, l2=1e-3, l2_shrinkage=1e-3, beta=0.1),
    Update(SGD(0.1)),
    Update(Adam(0.1), l2=1e-3, moving_average=0.9),
    Update(Ftrl(1.0, l1=1e-3), l2=1e-3, moving_average=0.9),
]

every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: repr(rule)[:70])


@every_rule
def test_rule_on_a_parabola_finds_its_minimum(rule: Rule) -> None:
    w = np.array([5.0, -2.0, 3.1], np.float32)
    slots = new_slots(rule, w)
    for step in range(400):
        rule.update(w, w - np.float32(3), slots, step)
    np.testing.assert_allclose(w, 3.0, atol=0.03)


@every_rule
@settings(max_examples=25)
@given(cuts=st.lists(st.integers(0, 50), max_size=6))
def test_rule_block_by_block_equals_the_whole_bit_for_bit(rule: Rule, cuts: list[int]) -> None:
    whole, cut = Run(rule, 50), Run(rule, 50)
    for step in range(2):
        whole.step(step)
        cut.step(step, cuts=cuts)
    assert cut.memory == whole.memory


@every_rule
def test_rule_shared_by_threads_gives_the_bits_of_each_alone(rule: Rule) -> None:
    size = BLOCK_SIZE + 1
    with ThreadPoolExecutor(2) as threads:
        together = list(
            threads.map(lambda seed: Run(rule, size, seed=seed).steps(3).memory, (1, 2))
        )
    assert together == [Run(rule, size, seed=seed).steps(3).memory for seed in (1, 2)]


@every_rule
def test_non_finite_gradient_stays_in_its_element_and_warns_nobody(rule: Rule) -> None:
    quiet, others = rule if isinstance(rule, Update) else Update(rule), [0, 1, 3, 4]
    clean = Run(quiet, 5).step(0, np.ones(5, np.float32)).parameters[others]
    assert np.isfinite(clean).all()
    for poison in (np.nan, np.inf, -np.inf):
        hurt = Run(quiet, 5).step(0, np.array([1, 1, poison, 1, 1], np.float32))
        assert hurt.parameters[others].tobytes() == clean.tobytes()


@every_rule
def test_update_of_a_large_run_allocates_a_few_blocks(rule: Rule) -> None:
    run = Run(rule, 40 * BLOCK_SIZE)
    gradient = np.ones_like(run.parameters)
    Run(rule, 1).step(0)  # a kernel may be compiled
    tracemalloc.start()
    try:
        rule.update(run.parameters, gradient, run.slots, step=0)
        _, peak_nbytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_nbytes < 13 * (4 * BLOCK_SIZE)


@every_rule
def test_rule_written_as_text_and_read_back_is_equal(rule: Rule) -> None:
    assert eval(repr(rule)) == rule
    assert isinstance(rule, Rule)


def test_rules_that_differ_have_different_texts() -> None:
    assert len({repr(rule) for rule in RULES}) == len(RULES)


def test_slots_of_a_rule_start_as_declared() -> None:
    parameters = np.array([1.0, 2.0], np.float32)
    slots = new_slots(Update(RMSProp(0.1, momentum=0.5), moving_average=0.9), parameters)
    assert {name: slot.tolist() for name, slot in slots.items()} == {
        "mean_square": [1.0, 1.0],
        "momentum": [0.0, 0.0],
        "average": [1.0, 2.0],
    }
    assert not np.shares_memory(slots["average"], parameters)
