"""Rules refuse what cannot work, when the job is written."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from math import inf, nan
from typing import Any

import numpy as np
import pytest

from zmqtrain.errors import ConfigError
from zmqtrain.optim import (
    LAMB,
    SGD,
    Adafactor,
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
    Muon,
    NAdam,
    NaturalExponential,
    Piecewise,
    Polynomial,
    RAdam,
    RMSProp,
    RowwiseAdagrad,
    Warmup,
    new_slots,
)

RULES = [SGD, Momentum, Adagrad, RMSProp, Adam, Ftrl, AdamW, Lion, LAMB, Adafactor, Muon]
RULES += [NAdam, RAdam, Adamax]
CALLS = iter(range(99))


@pytest.mark.parametrize("make", RULES)
def test_rule_with_impossible_learning_rate_is_refused(make: type) -> None:
    for rate in ("0.1", None, -0.1, nan, inf, True, Polynomial):
        told = rf"^the learning rate is {re.escape(repr(rate))}; expected a schedule or a finite "
        with pytest.raises(ConfigError, match=told + ".*; correct learning_rate in the job$"):
            make(rate)


@pytest.mark.parametrize("make", RULES)
def test_rule_with_a_function_of_the_step_shows_its_rates(make: type) -> None:
    rules = [make(lambda step: 0.1 / (1 + step)) for _ in range(2)]
    assert repr(rules[0]) == repr(rules[1])
    assert "Function(0: 0.1, 1: 0.05, 10: 0.00909091" in repr(rules[0])
    assert "0x" not in repr(rules[0])


@pytest.mark.parametrize(
    ("schedule", "told"),
    [
        (lambda step: next(CALLS), "other rates when it is called again"),
        (lambda step: {0: 0.1}[step], "the rate of step 1 of .* failed: .*KeyError: 1"),
    ],
)
def test_function_of_the_step_that_is_not_pure_or_fails_is_refused(
    schedule: Any, told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        SGD(schedule).hyperparameters(1)


IMPOSSIBLE: list[tuple[Any, dict[str, tuple[object, ...]]]] = [
    (Momentum(0.1), {"momentum": (1.0, -0.1), "dampening": (1.5,)}),
    (Adagrad(0.1), {"initial_accumulator": (0.0, -1), "epsilon": (-1e-7,)}),
    (Adagrad(0.1, epsilon=1), {"initial_accumulator": (-1,)}),
    (RMSProp(0.1), {"rho": (1.0,), "momentum": (2,), "epsilon": (0.0,), "centered": (1,)}),
    (RMSProp(0.1), {"initial_mean_square": (-1.0,)}),
    (Adam(), {"beta1": (1.0,), "beta2": (nan,), "epsilon": (0, "1e-8"), "nesterov": (0.9,)}),
    (Ftrl(0.1), {"learning_rate_power": (0.5,), "initial_accumulator": (0.0,), "l1": (-1.0,)}),
    (Ftrl(0.1), {"l2": (-1.0,), "l2_shrinkage": (-1.0,), "beta": (-1.0,)}),
    (AdamW(), {"beta1": (1.0,), "epsilon": (0.0,), "weight_decay": (-0.1,)}),
    (Lion(), {"beta2": (1.0,), "weight_decay": (-0.1,)}),
    (LAMB(), {"beta2": (1.0,), "epsilon": (0.0,)}),
    (RowwiseAdagrad(0.1), {"initial_accumulator": (-1.0,), "epsilon": (0.0,)}),
    (Muon(), {"rms": (0.0,), "ns_steps": (0,), "coefficients": ((1.0, 2.0), (1.0, 2.0, "c"))}),
    (Adafactor(), {"decay_exponent": (0.1,), "epsilon1": (0.0,), "clip": (0.0,)}),
    (Exponential(0.1, 10, 0.5), {"decay_steps": (0.99, 0), "decay_rate": (1.5, 0.0)}),
    (Exponential(0.1, 10, 0.5), {"staircase": (0.5,), "initial": (nan,)}),
    (InverseTime(0.1, 10, 2), {"decay_steps": (0.5, 0), "decay_rate": (-1.0,)}),
    (NaturalExponential(0.1, 10, 2), {"decay_steps": (0, -1), "decay_rate": (-0.9,)}),
    (Polynomial(0.1, 10), {"decay_steps": (0.9, 0), "end": (-1.0,), "power": (0.0,)}),
    (Warmup(0.1, 10), {"steps": (0.9, 0), "start": (-1.0,)}),
    (Cosine(0.1, 10), {"decay_steps": (0.1, 0), "alpha": (1.5,)}),
    (Piecewise((1, 2), (1, 2, 3)), {"boundaries": ((-1, 5), (2, 2)), "values": ((1, 2, -0.2),)}),
]


@pytest.mark.parametrize(("sound", "options"), IMPOSSIBLE)
def test_impossible_option_is_refused_by_name_and_value(
    sound: Any, options: dict[str, tuple[object, ...]]
) -> None:
    for name, values in options.items():
        for value in values:
            told = re.escape(f"{type(sound).__name__}: {name} is {value!r}; expected ")
            with pytest.raises(ConfigError, match=rf"^{told}.*; correct {name} in the job$"):
                replace(sound, **{name: value})
        if type(getattr(sound, name)) in (int, float):
            for value in (nan, inf, None, "1", True):
                with pytest.raises(ConfigError, match=f"{name} is {value!r}; expected a"):
                    replace(sound, **{name: value})


def test_ftrl_whose_schedule_ends_at_zero_says_at_which_step() -> None:
    rule = Ftrl(Polynomial(0.1, 10, end=0.0))
    w = np.ones(1, np.float32)
    with pytest.raises(ConfigError, match="Ftrl: the learning rate is 0 at step 10; expected one"):
        rule.update(w, w.copy(), new_slots(rule, w), step=10)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (partial(AdamW, lr=0.1), "AdamW has no option 'lr'.*did you mean learning_rate"),
        (partial(Adam, 0.1, beta_1=0.9), "Adam has no option 'beta_1'.*did you mean beta1"),
        (partial(Momentum, 0.1, eps=1), "Momentum has no option 'eps'; it has learning_rate"),
        (partial(Cosine, 0.1, steps=1), "Cosine has no option 'steps'.*did you mean decay_steps"),
        (partial(Exponential, 0.1, 0.99, 6000), r"as in Exponential\(0.1, 6000, 0.99\)"),
    ],
)
def test_option_under_the_name_of_another_library_is_refused_with_its_own(
    make: partial[object], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        make()
