"""Rules against their formulas, element by element in float64, and against known numbers."""

from __future__ import annotations

from collections.abc import Callable
from math import copysign, sqrt
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from zmqtrain.compute.arrays import BLOCK_SIZE
from zmqtrain.optim import (
    LAMB,
    SGD,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Flat,
    Ftrl,
    LayerRule,
    Lion,
    Momentum,
    NAdam,
    Piecewise,
    RAdam,
    RMSProp,
    Rule,
    new_slots,
)

RATES = (0.1, 0.03, 0.03, 0.2, 0.2)
SCHEDULE = Piecewise((0, 2), (0.1, 0.03, 0.2))

State = dict[str, float]
Step = Callable[[float, float, float, int, State], float]
"""(w, g, lr, t, state) -> w after update number t = 1, 2, ...; the state starts empty."""

Vector = NDArray[np.float64]
Vectors = dict[str, Vector]
Layer = Callable[[Vector, Vector, float, int, Vectors], Vector]
"""The same of a whole variable."""


def sgd(w: float, g: float, lr: float, t: int, s: State) -> float:
    return w - lr * g


def momentum(mu: float, nesterov: bool = False) -> Step:
    def step(w: float, g: float, lr: float, t: int, s: State) -> float:
        s["a"] = mu * s.get("a", 0.0) + g
        return w - lr * g - lr * mu * s["a"] if nesterov else w - lr * s["a"]

    return step


def keras_momentum(mu: float, nesterov: bool = False) -> Step:
    def step(w: float, g: float, lr: float, t: int, s: State) -> float:
        s["v"] = mu * s.get("v", 0.0) - lr * g
        return w + mu * s["v"] - lr * g if nesterov else w + s["v"]

    return step


def adagrad(a0: float, root: Callable[[float], float]) -> Step:
    def step(w: float, g: float, lr: float, t: int, s: State) -> float:
        s["a"] = s.get("a", a0) + g * g
        return w - lr * g / root(s["a"])

    return step


def rmsprop(
    rho: float, mu: float, ms0: float, root: Callable[[float], float], centered: bool = False
) -> Step:
    def step(w: float, g: float, lr: float, t: int, s: State) -> float:
        s["ms"] = rho * s.get("ms", ms0) + (1 - rho) * g * g
        s["mg"] = rho * s.get("mg", 0.0) + (1 - rho) * g
        spread = s["ms"] - s["mg"] ** 2 if centered else s["ms"]
        s["mom"] = mu * s.get("mom", 0.0) + lr * g / root(spread)
        return w - s["mom"]

    return step


def adam(b1: float, b2: float, eps: float, nesterov: bool = False) -> Step:
    def step(w: float, g: float, lr: float, t: int, s: State) -> float:
        m, v = moments(s, g, b1, b2)
        direction = b1 * m + (1 - b1) * g if nesterov else m
        return w - lr * sqrt(1 - b2**t) / (1 - b1**t) * direction / (sqrt(v) + eps)

    return step


def ftrl(
    power: float, n0: float, l1: float, l2: float, shrinkage: float = 0.0, beta: float = 0.0
) -> Step:
    def step(w: float, g: float, lr: float, t: int, s: State) -> float:
        old = s.get("n", n0)
        new = old + g * g
        sigma = (new**-power - old**-power) / lr
        z = s.get("z", 0.0) + g + 2 * shrinkage * w - sigma * w
        s["n"], s["z"] = new, z
        if abs(z) <= l1:
            return 0.0
        return (copysign(l1, z) - z) / (new**-power / lr + 2 * (l2 + beta / (2 * lr)))

    return step


def moments(s: Any, g: Any, b1: float, b2: float) -> tuple[Any, Any]:
    """Return the moving averages of the gradients and of their squares."""
    s["m"] = b1 * s.get("m", 0.0) + (1 - b1) * g
    s["v"] = b2 * s.get("v", 0.0) + (1 - b2) * g * g
    return s["m"], s["v"]


def adamw(b1: float, b2: float, eps: float, decay: float) -> Step:
    """Formula in torch.optim.AdamW's documentation."""

    def step(w: float, g: float, lr: float, t: int, s: State) -> float:
        m, v = moments(s, g, b1, b2)
        return w - lr * decay * w - lr * m / (1 - b1**t) / (sqrt(v / (1 - b2**t)) + eps)

    return step


def nadam(b1: float, b2: float, eps: float, slow: float, decay: float) -> Step:
    """Formula in torch.optim.NAdam's documentation."""

    def mu(t: int) -> float:
        return b1 * (1 - 0.5 * 0.96 ** (t * slow))

    def step(w: float, g: float, lr: float, t: int, s: State) -> float:
        m, v = moments(s, g, b1, b2)
        product = s["product"] = s.get("product", 1.0) * mu(t)
        mean = mu(t + 1) * m / (1 - product * mu(t + 1)) + (1 - mu(t)) * g / (1 - product)
        return w - lr * decay * w - lr * mean / (sqrt(v / (1 - b2**t)) + eps)

    return step


def radam(b1: float, b2: float, eps: float, decay: float) -> Step:
    """Formula in torch.optim.RAdam's documentation."""

    def step(w: float, g: float, lr: float, t: int, s: State) -> float:
        m, v = moments(s, g, b1, b2)
        w, mean, most = w - lr * decay * w, m / (1 - b1**t), 2 / (1 - b2) - 1
        r = most - 2 * t * b2**t / (1 - b2**t)
        if r <= 5:
            return w - lr * mean
        rectified = sqrt((r - 4) * (r - 2) * most / ((most - 4) * (most - 2) * r))
        return w - lr * mean * rectified * sqrt(1 - b2**t) / (sqrt(v) + eps)

    return step


def adamax(b1: float, b2: float, eps: float) -> Step:
    """Formula in torch.optim.Adamax's documentation."""

    def step(w: float, g: float, lr: float, t: int, s: State) -> float:
        m, _ = moments(s, g, b1, b2)
        s["u"] = max(b2 * s.get("u", 0.0), abs(g) + eps)
        return w - lr * m / ((1 - b1**t) * s["u"])

    return step


def lion(b1: float, b2: float, decay: float) -> Step:
    """The paper's Program 1."""

    def step(w: float, g: float, lr: float, t: int, s: State) -> float:
        m = s.get("m", 0.0)
        update = b1 * m + (1 - b1) * g
        s["m"] = b2 * m + (1 - b2) * g
        sign = copysign(1.0, update) if update else 0.0
        return w - lr * (sign + decay * w)

    return step


def lamb(b1: float, b2: float, eps: float, decay: float) -> Layer:
    """The paper's Algorithm 2."""

    def step(w: Vector, g: Vector, lr: float, t: int, s: Vectors) -> Vector:
        m, v = moments(s, g, b1, b2)
        update = m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps) + decay * w
        return w - lr * np.linalg.norm(w) / np.linalg.norm(update) * update

    return step


def adafactor(exponent: float, eps1: float, eps2: float, clip: float, relative: bool) -> Layer:
    """The paper's Algorithm 5, with the step sizes of Algorithm 6."""

    def step(w: Vector, g: Vector, lr: float, t: int, s: Vectors) -> Vector:
        beta = 1 - t**exponent
        s["v"] = beta * s.get("v", 0.0) + (1 - beta) * (g**2 + eps1)
        u = g / np.sqrt(s["v"])
        rho = min(lr, 1 / sqrt(t)) if relative else lr
        return w - max(eps2, rms(w)) * rho * u / max(1.0, rms(u) / clip)

    def rms(values: Vector) -> float:
        return float(np.sqrt(np.mean(values**2)))

    return step


REFERENCES: list[tuple[Rule, Step]] = [
    (SGD(SCHEDULE), sgd),
    (Momentum(SCHEDULE), momentum(0.9)),
    (Momentum(SCHEDULE, momentum=0.0), sgd),
    (Momentum(SCHEDULE, momentum=0.5, nesterov=True), momentum(0.5, nesterov=True)),
    (Momentum(SCHEDULE, scaled_velocity=True), keras_momentum(0.9)),
    (Momentum(SCHEDULE, 0.8, True, scaled_velocity=True), keras_momentum(0.8, nesterov=True)),
    (Adagrad(SCHEDULE), adagrad(0.1, sqrt)),
    (Adagrad(SCHEDULE, 0.0, epsilon=0.01), adagrad(0.0, lambda a: sqrt(a) + 0.01)),
    (
        Adagrad(SCHEDULE, 0.5, 0.01, epsilon_inside_sqrt=True),
        adagrad(0.5, lambda a: sqrt(a + 0.01)),
    ),
    (RMSProp(SCHEDULE), rmsprop(0.9, 0.0, 1.0, lambda s: sqrt(s + 1e-10))),
    (
        RMSProp(SCHEDULE, rho=0.7, momentum=0.6, epsilon=0.02, initial_mean_square=0.0),
        rmsprop(0.7, 0.6, 0.0, lambda s: sqrt(s + 0.02)),
    ),
    (
        RMSProp(SCHEDULE, epsilon=0.02, epsilon_inside_sqrt=False),
        rmsprop(0.9, 0.0, 1.0, lambda s: sqrt(s) + 0.02),
    ),
    (
        RMSProp(SCHEDULE, momentum=0.5, epsilon=0.02, centered=True),
        rmsprop(0.9, 0.5, 1.0, lambda s: sqrt(s + 0.02), centered=True),
    ),
    (Adam(SCHEDULE), adam(0.9, 0.999, 1e-8)),
    (Adam(SCHEDULE, beta1=0.5, beta2=0.9, epsilon=0.1), adam(0.5, 0.9, 0.1)),
    (Adam(SCHEDULE, beta1=0.0), adam(0.0, 0.999, 1e-8)),
    (Adam(SCHEDULE, epsilon=0.01, nesterov=True), adam(0.9, 0.999, 0.01, nesterov=True)),
    (Ftrl(SCHEDULE), ftrl(-0.5, 0.1, 0.0, 0.0)),
    (Ftrl(SCHEDULE, l1=0.4, l2=0.3), ftrl(-0.5, 0.1, 0.4, 0.3)),
    (Ftrl(SCHEDULE, -0.7, 0.2, l2_shrinkage=0.1), ftrl(-0.7, 0.2, 0.0, 0.0, shrinkage=0.1)),
    (Ftrl(SCHEDULE, 0.0, beta=0.5), ftrl(0.0, 0.1, 0.0, 0.0, beta=0.5)),
    (Ftrl(SCHEDULE, initial_accumulator=0.0, beta=0.5), ftrl(-0.5, 0.0, 0.0, 0.0, beta=0.5)),
    (AdamW(SCHEDULE), adamw(0.9, 0.999, 1e-8, 0.01)),
    (AdamW(SCHEDULE, 0.5, 0.9, 0.1, weight_decay=0.5), adamw(0.5, 0.9, 0.1, 0.5)),
    (NAdam(SCHEDULE), nadam(0.9, 0.999, 1e-8, 0.004, 0.0)),
    (NAdam(SCHEDULE, 0.5, 0.9, 0.1, 1.0, 0.5), nadam(0.5, 0.9, 0.1, 1.0, 0.5)),
    (RAdam(SCHEDULE), radam(0.9, 0.999, 1e-8, 0.0)),
    (RAdam(SCHEDULE, 0.5, 0.9, 0.1, 0.5), radam(0.5, 0.9, 0.1, 0.5)),
    (Adamax(SCHEDULE), adamax(0.9, 0.999, 1e-8)),
    (Adamax(SCHEDULE, 0.5, 0.9, 0.1), adamax(0.5, 0.9, 0.1)),
    (Lion(SCHEDULE), lion(0.9, 0.99, 0.0)),
    (Lion(SCHEDULE, 0.5, 0.3, weight_decay=0.5), lion(0.5, 0.3, 0.5)),
]

LAYERED: list[tuple[LayerRule, Layer]] = [
    (LAMB(SCHEDULE), lamb(0.9, 0.999, 1e-6, 0.01)),
    (LAMB(SCHEDULE, 0.5, 0.9, 0.1, weight_decay=0.5), lamb(0.5, 0.9, 0.1, 0.5)),
    (Adafactor(SCHEDULE), adafactor(-0.8, 1e-30, 1e-3, 1.0, relative=True)),
    (Adafactor(2.0, clip=0.5), adafactor(-0.8, 1e-30, 1e-3, 0.5, relative=True)),
    (
        Adafactor(SCHEDULE, -0.5, 0.1, 3.0, 0.2, relative_step=False),
        adafactor(-0.5, 0.1, 3.0, 0.2, relative=False),
    ),
]

LENGTHS = (1, BLOCK_SIZE - 1, BLOCK_SIZE, 2 * BLOCK_SIZE + 3)

# A period of 7 does not divide a block, so a block taken from the wrong place shows.
PARAMETERS = (0.5, -1.0, 0.0, 2.0, 1e-3, -0.25, 1.5)
GRADIENTS = (
    (0.1, -0.5, 1.0, 0.0, 2.0, -1e-3, 0.7),
    (0.3, 0.5, 1.5, 0.0, -2.0, -2e-3, 0.7),
    (-0.2, -0.1, 0.0, 1.0, 0.5, 4e-3, 0.7),
    (0.2, 0.9, -1.0, -0.1, 0.5, 1e-2, 0.7),
    (1.2, -0.4, -3.0, 0.3, 0.1, 1.0, 0.7),
)


def parameters_by_reference(step: Step) -> list[list[float]]:
    """Return the seven parameters after each update."""
    columns = []
    for w, gradients in zip(PARAMETERS, zip(*GRADIENTS, strict=True), strict=True):
        state: State = {}
        column = []
        for t, (g, lr) in enumerate(zip(gradients, RATES, strict=True), start=1):
            w = step(w, g, lr, t, state)
            column.append(w)
        columns.append(column)
    return [list(row) for row in zip(*columns, strict=True)]


def as_flat(values: object, size: int) -> Flat:
    return np.resize(np.array(values, np.float32), size)


def train(rule: Rule, parameters: object, gradients: list[object]) -> Flat:
    """Return the parameters after one update for each gradient."""
    w = np.array(parameters, np.float32)
    slots = new_slots(rule, w)
    for step, gradient in enumerate(gradients):
        rule.update(w, np.array(gradient, np.float32), slots, step)
    return w


def named(value: object) -> str:
    """Return a test's name for a rule or its formula, the same in every process."""
    return repr(value)[:60] if isinstance(value, Rule) else ""


@pytest.mark.parametrize(("rule", "reference"), REFERENCES, ids=named)
def test_rule_over_several_steps_follows_its_formula(rule: Rule, reference: Step) -> None:
    for size in LENGTHS:
        w = as_flat(PARAMETERS, size)
        slots = new_slots(rule, w)
        for step, expected in enumerate(parameters_by_reference(reference)):
            rule.update(w, as_flat(GRADIENTS[step], size), slots, step)
            np.testing.assert_allclose(w, np.resize(expected, size), rtol=3e-5, atol=3e-6)


@pytest.mark.parametrize("size", LENGTHS)
@pytest.mark.parametrize(("rule", "reference"), LAYERED, ids=named)
def test_rule_with_norms_over_several_steps_follows_its_formula(
    rule: LayerRule, reference: Layer, size: int
) -> None:
    w, state = as_flat(PARAMETERS, size), {}
    expected, slots = w.astype(np.float64), new_slots(rule, w)
    for step, gradient in enumerate(GRADIENTS):
        g = as_flat(gradient, size)
        rule.update(w, g, slots, step)
        rate = RATES[step] if rule.learning_rate == SCHEDULE else 2.0
        expected = reference(expected, g.astype(np.float64), rate, step + 1, state)
        np.testing.assert_allclose(w, expected, rtol=1e-4, atol=1e-5)


def test_lamb_of_parameters_that_are_zero_steps_as_adam_does() -> None:
    w = train(LAMB(0.1, epsilon=1e-8), [0.0, 0.0], [[1.0, -2.0]])
    np.testing.assert_allclose(w, [-0.1, 0.1], rtol=1e-5)


def test_adafactor_moves_parameters_that_are_zero() -> None:
    w = train(Adafactor(), [0.0, 0.0], [[1.0, -2.0]])
    np.testing.assert_allclose(w, [-1e-5, 1e-5], rtol=1e-5)  # epsilon2 * rho


def test_centered_rmsprop_of_a_constant_gradient_stays_finite() -> None:
    # mean_square - mean_gradient^2 goes to 0 and, rounded, below.
    gradient = [tenths / 10 for tenths in range(1, 60)]
    w = train(RMSProp(1e-6, rho=0.5, centered=True), [0.0] * 59, [gradient] * 200)
    assert np.isfinite(w).all()


@pytest.mark.parametrize(
    ("rule", "parameters", "gradient", "steps", "expected"),
    [
        (Momentum(2.0), [1.0, 2.0], [0.1, 0.1], 2, [0.42, 1.42]),
        (Adagrad(3.0), [1.0, 2.0], [0.1, 0.1], 3, [-1.6026099, -0.6026099]),
        (Ftrl(3.0), [0.0, 0.0], [0.1, 0.2], 3, [-2.60260963, -4.29698515]),
        (Ftrl(3.0), [0.0, 0.0], [0.01, 0.02], 3, [-0.28432083, -0.56694895]),
        (Ftrl(3.0, l1=0.001, l2=2.0), [1.0, 2.0], [0.1, 0.2], 10, [-0.24059935, -0.46829352]),
    ],
)
def test_rule_on_the_inputs_of_tensorflows_tests_gives_their_numbers(
    rule: Rule, parameters: list[float], gradient: list[float], steps: int, expected: list[float]
) -> None:
    np.testing.assert_allclose(train(rule, parameters, [gradient] * steps), expected, rtol=2e-6)
