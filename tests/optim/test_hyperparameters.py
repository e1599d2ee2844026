"""Rules refuse what cannot work, when the job is written."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from zmqtrain.errors import ConfigError
from zmqtrain.optim import (
    LAMB,
    SGD,
    Adafactor,
    Adagrad,
    Adam,
    AdamW,
    Cosine,
    Exponential,
    Ftrl,
    InverseTime,
    Lion,
    Momentum,
    NaturalExponential,
    Piecewise,
    Polynomial,
    RMSProp,
    new_slots,
)

RULES = [SGD, Momentum, Adagrad, RMSProp, Adam, Ftrl, AdamW, Lion, LAMB, Adafactor]


class Warmup:
    """A schedule whose text says where it lies in memory."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __call__(self, step: int) -> float:
        return min(1.0, step / self.steps)


@pytest.mark.parametrize("make", RULES)
@pytest.mark.parametrize("rate", ["0.1", None, -0.1, float("nan"), float("inf"), True, Polynomial])
def test_rule_with_impossible_learning_rate_is_refused(make: type, rate: object) -> None:
    with pytest.raises(ConfigError, match=r"^the learning rate is .*; expected a schedule or a"):
        make(rate)


@pytest.mark.parametrize("make", RULES)
@pytest.mark.parametrize("schedule", [lambda step: 0.1, Warmup(100)], ids=["lambda", "object"])
def test_rule_with_schedule_that_has_no_stable_text_is_refused(
    make: type, schedule: object
) -> None:
    with pytest.raises(ConfigError, match="make the schedule a frozen dataclass"):
        make(schedule)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (partial(Momentum, 0.1, momentum=1.0), "Momentum: momentum is 1.0"),
        (partial(Momentum, 0.1, momentum=-0.1), "Momentum: momentum is -0.1"),
        (partial(Adagrad, 0.1, initial_accumulator=0.0), "Adagrad: initial_accumulator is 0.0"),
        (partial(Adagrad, 0.1, initial_accumulator=-1, epsilon=1), "Adagrad: initial_accumulator"),
        (partial(Adagrad, 0.1, epsilon=-1e-7), "Adagrad: epsilon is -1e-07"),
        (partial(RMSProp, 0.1, rho=1.0), "RMSProp: rho is 1.0"),
        (partial(RMSProp, 0.1, momentum=2), "RMSProp: momentum is 2"),
        (partial(RMSProp, 0.1, epsilon=0.0), "RMSProp: epsilon is 0.0"),
        (partial(RMSProp, 0.1, initial_mean_square=-1.0), "RMSProp: initial_mean_square is -1.0"),
        (partial(Adam, beta1=1.0), "Adam: beta1 is 1.0"),
        (partial(Adam, beta2=float("nan")), "Adam: beta2 is nan"),
        (partial(Adam, epsilon=0), "Adam: epsilon is 0"),
        (partial(Adam, epsilon="1e-8"), "Adam: epsilon is '1e-8'"),
        (partial(Ftrl, 0.1, learning_rate_power=0.5), "Ftrl: learning_rate_power is 0.5"),
        (partial(Ftrl, 0.1, initial_accumulator=0.0), "Ftrl: initial_accumulator is 0.0"),
        (partial(Ftrl, 0.1, l1=-1.0), "Ftrl: l1 is -1.0"),
        (partial(Ftrl, 0.1, l2=-1.0), "Ftrl: l2 is -1.0"),
        (partial(Ftrl, 0.1, l2_shrinkage=-1.0), "Ftrl: l2_shrinkage is -1.0"),
        (partial(Ftrl, 0.1, beta=-1.0), "Ftrl: beta is -1.0"),
        (partial(AdamW, beta1=1.0), "AdamW: beta1 is 1.0"),
        (partial(AdamW, epsilon=0.0), "AdamW: epsilon is 0.0"),
        (partial(AdamW, weight_decay=-0.1), "AdamW: weight_decay is -0.1"),
        (partial(Lion, beta2=1.0), "Lion: beta2 is 1.0"),
        (partial(Adam, nesterov=0.9), "Adam: nesterov is 0.9"),
        (partial(RMSProp, 0.1, centered=1), "RMSProp: centered is 1"),
        (partial(Exponential, 0.1, 0.99, 6000), "Exponential: decay_steps is 0.99"),
        (partial(Exponential, 0.1, 6000, 1.5), "Exponential: decay_rate is 1.5"),
        (partial(Exponential, 0.1, 6000, 0.99, 0.5), "Exponential: staircase is 0.5"),
        (partial(InverseTime, 0.1, 0.5, 2), "InverseTime: decay_steps is 0.5"),
        (partial(NaturalExponential, 0.1, 0, 2), "NaturalExponential: decay_steps is 0"),
        (partial(Polynomial, 0.1, 0.9), "Polynomial: decay_steps is 0.9"),
        (partial(Cosine, 0.1, 0.1), "Cosine: decay_steps is 0.1"),
        (partial(Piecewise, [-1, 5], [1, 2, 3]), r"Piecewise: boundaries is \(-1, 5\)"),
        (partial(Lion, weight_decay=-0.1), "Lion: weight_decay is -0.1"),
        (partial(LAMB, beta2=1.0), "LAMB: beta2 is 1.0"),
        (partial(LAMB, epsilon=0.0), "LAMB: epsilon is 0.0"),
        (partial(Adafactor, decay_exponent=0.1), "Adafactor: decay_exponent is 0.1"),
        (partial(Adafactor, epsilon1=0.0), "Adafactor: epsilon1 is 0.0"),
        (partial(Adafactor, clip=0.0), "Adafactor: clip is 0.0"),
    ],
)
def test_rule_with_impossible_hyperparameter_is_refused(make: partial, complaint: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^{complaint}.*; expected a .*; correct .* in the job$"
    ):
        make()


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
    ],
)
def test_option_under_the_name_of_another_library_is_refused_with_its_own(
    make: partial[object], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        make()
