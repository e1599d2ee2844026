"""Rules that see a variable as a matrix. The notation is that of rules.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np

from zmqtrain.errors import ConfigError
from zmqtrain.optim.checks import (
    NonNegative,
    NonPositive,
    Positive,
    Steps,
    check_positive,
    is_number,
)
from zmqtrain.optim.clipping import sum_of_squares
from zmqtrain.optim.formula import MatrixRule, Numbers, approach, rounded
from zmqtrain.optim.schedules import Coefficient, Rate, momentum_at, rate_at


@dataclass(frozen=True, slots=True)
class Muon(MatrixRule):
    """Steps along an orthogonal matrix, for matrices only (Jordan et al., 2024).

    With a the slot "momentum", 0 at first, and NS the Newton-Schulz iteration with
    ``coefficients``, ``ns_steps`` times, of a matrix divided by its Frobenius norm:

        a += (1 - momentum) * (g - a)
        u = NS(g + momentum * (a - g))      u = NS(a)       without ``nesterov``
        w -= lr * weight_decay * w
        w -= lr * ratio * u

    ratio is sqrt(max(1, rows / columns)), or ``rms`` * sqrt(max(rows, columns)) if that is given:
    with 0.2 steps are as long as those of AdamW (Liu et al., arXiv:2502.16982).

    It is torch.optim.Muon, and its defaults, but for the precision of NS: float32 here, bfloat16
    there, which makes a difference of some percent in single elements of u.
    """

    zero_slots = ("momentum",)
    learning_rate: Rate = 0.001
    weight_decay: NonNegative = 0.1
    momentum: Coefficient = 0.95
    nesterov: bool = True
    coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315)
    epsilon: Positive = 1e-7
    ns_steps: Steps = 5
    rms: float | None = None

    def __post_init__(self) -> None:
        MatrixRule.__post_init__(self)
        if self.rms is not None:
            check_positive(self, "rms")
        if len(self.coefficients) != 3 or not all(map(is_number, self.coefficients)):
            raise ConfigError(
                f"Muon: coefficients is {self.coefficients!r}; expected three numbers; correct "
                "coefficients in the job"
            )

    def hyperparameters(self, step: int) -> Numbers:
        rate = rate_at(self.learning_rate, step)
        return rounded(1 - momentum_at(self.momentum, step), rate * self.weight_decay)

    def factor(self, squares: tuple[float, float], size: int, step: int) -> np.float32:
        return np.float32(rate_at(self.learning_rate, step))

    @staticmethod
    def formula(w: Any, g: Any, a: Any, share: Any, decay: Any) -> tuple[Any, ...]:
        return g, approach(a, g, share)

    def sees(self, shape: Sequence[int]) -> bool:
        return True

    def check(self, name: str, shape: Sequence[int], l2: float) -> None:
        if len(shape) != 2:
            raise ConfigError(
                f"{self!r} would train {name!r} of shape {tuple(shape)}; expected a matrix; give "
                'the others a rule of their own, by groups={"*bias": {"optimizer": AdamW(0.001)}}'
            )
        if l2:
            raise ConfigError(
                f"{name!r} has l2={l2} and {self!r}; expected none; give Muon a weight_decay, and "
                '"l2" to the groups of others'
            )

    def direction(self, gradient: Any, slots: Sequence[Any], numbers: Numbers, exact: bool) -> Any:
        (momentum,) = slots
        given = approach(momentum, gradient, numbers[0]) if self.nesterov else momentum
        rows, columns = gradient.shape
        x = given.T if rows > columns else given
        x = x / max(float(np.sqrt(sum_of_squares(x))), self.epsilon)
        a, b, c = map(np.float32, self.coefficients)
        for _ in range(self.ns_steps):
            gram = rows_by_rows(x, x, exact)
            square = rows_by_rows(gram, gram, exact)  # gram is symmetric
            x = a * x + rows_by_rows(b * gram + c * square, x.T, exact)
        ratio = sqrt(max(1, rows / columns))
        if self.rms is not None:
            ratio = self.rms * sqrt(max(rows, columns))
        return np.float32(ratio) * (x.T if rows > columns else x)


@dataclass(frozen=True, slots=True)
class Adafactor(MatrixRule):
    """Steps in proportion to the variable, clipped (Shazeer and Stern, arXiv:1804.04235).

    With v the slot of that name, 0 at first, t = step + 1, RMS the root of the mean square over a
    variable, and r, c and m the means of v over columns, over rows, and over both:

        v += t^decay_exponent * (g^2 + epsilon1 - v)
        u = g / sqrt(r * c / m)             u = g / sqrt(v)     of a vector, or not ``factored``
        rho = min(lr, 1 / sqrt(t))          rho = lr            without ``relative_step``
        w -= lr * weight_decay * w
        w -= max(epsilon2, RMS(w)) * rho * u / max(1, RMS(u) / clip)

    This is the paper's Algorithm 4, whose r and c are the means of v exactly, for its update is
    linear. Here v has an element for each parameter, so memory is that of a momentum. Of more than
    two dimensions the last two count. RMS(w) is that before the update. The defaults are the
    paper's, and Keras's but for the learning rate; those of PyTorch are given by :meth:`torch`.
    With ``clamped``, as there, epsilon1 is not added: it is the least m, and the least root.
    """

    zero_slots = ("v",)
    learning_rate: Rate = 0.01
    decay_exponent: NonPositive = -0.8
    epsilon1: Positive = 1e-30
    epsilon2: NonNegative = 1e-3
    clip: Positive = 1.0
    relative_step: bool = True
    factored: bool = True
    weight_decay: NonNegative = 0.0
    clamped: bool = False

    @classmethod
    def torch(cls, learning_rate: Rate = 0.01, **options: Any) -> Adafactor:
        """Return the rule of torch.optim.Adafactor, with its defaults."""
        return cls(learning_rate, **{"epsilon1": 2.0**-23, "clamped": True} | options)

    def hyperparameters(self, step: int) -> Numbers:
        added, least = (0.0, self.epsilon1) if self.clamped else (self.epsilon1, 0.0)
        decay = rate_at(self.learning_rate, step) * self.weight_decay
        return rounded((step + 1) ** self.decay_exponent, added, least, decay)

    def factor(self, squares: tuple[float, float], size: int, step: int) -> np.float32:
        of_parameters, of_direction = (sqrt(square / max(size, 1)) for square in squares)
        rate = rate_at(self.learning_rate, step)
        if self.relative_step:
            rate = min(rate, 1 / sqrt(step + 1))
        length = max(self.epsilon2, of_parameters) * rate
        return np.float32(length / max(1.0, of_direction / self.clip))

    @staticmethod
    def formula(w: Any, g: Any, v: Any, share: Any, added: Any, *others: Any) -> tuple[Any, ...]:
        v = approach(v, g * g + added, share)
        return g / np.maximum(np.sqrt(v), others[0]), v

    def sees(self, shape: Sequence[int]) -> bool:
        return bool(self.weight_decay) or (self.factored and len(shape) > 1)

    def direction(self, gradient: Any, slots: Sequence[Any], numbers: Numbers, exact: bool) -> Any:
        (v,), (_, _, least, _) = slots, numbers
        if self.factored and v.ndim > 1:
            rows, columns = (v.mean(axis, np.float64, keepdims=True) for axis in (-1, -2))
            mean = np.maximum(rows.mean(-2, keepdims=True), least)
            v = (rows / mean).astype(np.float32) * columns.astype(np.float32)
        return gradient / np.maximum(np.sqrt(v), least)


def rows_by_rows(a: Any, b: Any, exact: bool) -> Any:
    """Return a @ b.T in float32; ``exact``: with the same bits on every processor.

    Libraries of linear algebra add products up in an order that depends on the processor and on the
    number of threads. So each row is rounded to whole numbers of a unit of its own, a power of two
    so large that float64 holds every sum of their products: for k columns
    2^-((53 - log2 k) / 2) of the largest element, which is 2^-21 for k = 1024.
    """
    if not exact:
        return a @ b.T
    bits = (53 - (a.shape[1] - 1).bit_length()) // 2
    rows, units = _whole(a, bits)
    others, other_units = (rows, units) if b is a else _whole(b, bits)
    return (rows @ others.T * units * other_units.T).astype(np.float32)


def _whole(rows: Any, bits: int) -> tuple[Any, Any]:
    """Return each row as whole numbers of up to 2^bits, and its unit, both float64."""
    _, exponents = np.frexp(np.abs(rows).max(axis=1, keepdims=True, initial=0))
    units = np.ldexp(1.0, exponents - bits)
    return np.rint(rows / units), units
