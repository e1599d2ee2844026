"""Rules with a mean of gradients and a measure of their size: Adam and its descendants.

The notation is that of rules.py; the sources are the papers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zmqtrain.compute.arrays import Flat
from zmqtrain.optim.base import Slot
from zmqtrain.optim.checks import Decay, NonNegative, Positive
from zmqtrain.optim.formula import FormulaRule, LayerRule, Numbers, approach, rounded
from zmqtrain.optim.schedules import Coefficient, Rate, momentum_at, rate_at


@dataclass(frozen=True, slots=True)
class Moments(FormulaRule):
    """Base class of Adam and its descendants: slots "m" and "v", 0 at first."""

    zero_slots = ("m", "v")
    learning_rate: Rate = 0.001
    beta1: Coefficient = 0.9
    beta2: Decay = 0.999
    epsilon: Positive = 1e-8

    def caught_up(self, missed: NDArray[np.int64], step: int) -> dict[str, Flat]:
        """Return the factors by which rows of a table make up for updates that lacked them.

        ``missed``: k of each row, the number of updates without it since the last one with it,
        shape (n,). With ``catch_up`` its slots and its elements (key "") are multiplied by these
        factors, each of shape (n,), before update ``step``:

            m *= beta1^k        v *= beta2^k        w *= (1 - lr * weight_decay)^k

        That is what k updates with a gradient of zero make of the moments and of the decay, with
        the learning rate and the beta1 of this update. What m would have moved w by meanwhile is
        left out, as in torch's SparseAdam. Other variables have a gradient in each update.
        """
        return {"m": _power(momentum_at(self.beta1, step), missed), "v": _power(self.beta2, missed)}


def _power(base: float, exponents: NDArray[np.int64]) -> Flat:
    return np.power(base, exponents, dtype=np.float64).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Adam(Moments):
    """Adam (Kingma and Ba, arXiv:1412.6980), in the form with "epsilon hat" of its section 2.

    With m and v the slots of these names, 0 at first, and t = step + 1:

        alpha = lr * sqrt(1 - beta2^t) / (1 - beta1^t)
        m += (1 - beta1) * (g - m)
        v += (1 - beta2) * (g^2 - v)
        w -= alpha * m / (sqrt(v) + epsilon)

    ``nesterov`` puts beta1 * m + (1 - beta1) * g in place of m in the last line. The epsilon of the
    paper's Algorithm 1 is epsilon / sqrt(1 - beta2^t). Keras differs in the default 1e-7 only.
    ``catch_up``: see :meth:`Moments.caught_up`.
    """

    nesterov: bool = False
    catch_up: bool = False

    def hyperparameters(self, step: int) -> Numbers:
        t, beta1 = step + 1, momentum_at(self.beta1, step)
        correction = sqrt(1 - self.beta2**t) / (1 - beta1**t)
        alpha = rate_at(self.learning_rate, step) * correction
        numbers = rounded(alpha, beta1, 1 - beta1, 1 - self.beta2, self.epsilon)
        return (*numbers, bool(self.nesterov))

    @staticmethod
    def formula(w: Any, g: Any, m: Any, v: Any, *numbers: Any) -> tuple[Any, ...]:
        alpha, beta1, share1, share2, epsilon, nesterov = numbers
        m = approach(m, g, share1)
        v = approach(v, g * g, share2)
        direction = beta1 * m + share1 * g if nesterov else m
        return w - alpha * direction / (np.sqrt(v) + epsilon), m, v


@dataclass(frozen=True, slots=True)
class AdamW(Moments):
    """Adam with decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101, Algorithm 2).

    With m and v the slots of these names, 0 at first, and t = step + 1:

        m += (1 - beta1) * (g - m)
        v += (1 - beta2) * (g^2 - v)
        w -= lr * weight_decay * w
        w -= lr * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + epsilon)

    The decay follows the learning rate's schedule, as in torch.optim.AdamW, whose defaults these
    are, and the epsilon is that of Adam's Algorithm 1; so torch.optim.Adam is this rule without
    decay. ``epsilon_hat`` makes the epsilon that of :class:`Adam`, as Keras has it: epsilon /
    sqrt(1 - beta2^t) in place of epsilon. ``amsgrad`` puts the greatest v so far, in the slot
    "v_max", in place of v in the last line (Reddi et al., ICLR 2018). ``catch_up``: see
    :meth:`Moments.caught_up`.
    """

    weight_decay: NonNegative = 0.01
    epsilon_hat: bool = False
    amsgrad: bool = False
    catch_up: bool = False

    def caught_up(self, missed: NDArray[np.int64], step: int) -> dict[str, Flat]:
        decay = 1 - rate_at(self.learning_rate, step) * self.weight_decay
        return {**Moments.caught_up(self, missed, step), "": _power(decay, missed)}

    @property
    def slots(self) -> tuple[Slot, ...]:
        return tuple(Slot(name, 0.0) for name in self.formula_slots if name)

    @property
    def formula_slots(self) -> tuple[str | None, ...]:
        return "m", "v", "v_max" if self.amsgrad else None

    def hyperparameters(self, step: int) -> Numbers:
        t, rate, beta1 = step + 1, rate_at(self.learning_rate, step), momentum_at(self.beta1, step)
        correction = 1 / sqrt(1 - self.beta2**t)
        return rounded(
            rate / (1 - beta1**t),
            rate * self.weight_decay,
            1 - beta1,
            1 - self.beta2,
            correction,
            self.epsilon * correction if self.epsilon_hat else self.epsilon,
        )

    @staticmethod
    def formula(w: Any, g: Any, m: Any, v: Any, v_max: Any, *numbers: Any) -> tuple[Any, ...]:
        alpha, decay, share1, share2, correction, epsilon = numbers
        m = approach(m, g, share1)
        greatest = v = approach(v, g * g, share2)
        if v_max is not None:
            greatest = v_max = np.maximum(v_max, v)
        step = alpha * m / (np.sqrt(greatest) * correction + epsilon)
        return w - decay * w - step, m, v, v_max


@dataclass(frozen=True, slots=True)
class NAdam(Moments):
    """Adam with Nesterov's momentum, which rises slowly (Dozat, ICLR Workshop 2016).

    With m and v the slots of these names, 0 at first, t = step + 1, and mu(t) = beta1 * (1 - 0.5 *
    0.96^(t * momentum_decay)), whose product from 1 to t is p:

        m += (1 - beta1) * (g - m)
        v += (1 - beta2) * (g^2 - v)
        w -= lr * weight_decay * w
        w -= lr * (mu(t + 1) / (1 - p * mu(t + 1)) * m + (1 - mu(t)) / (1 - p) * g)
                / (sqrt(v / (1 - beta2^t)) + epsilon)

    It is torch.optim.NAdam with ``decoupled_weight_decay``, and its defaults. Keras's Nadam has a
    ``momentum_decay`` of 1 and an epsilon of 1e-7.
    """

    learning_rate: Rate = 0.002
    momentum_decay: NonNegative = 0.004
    weight_decay: NonNegative = 0.0

    def hyperparameters(self, step: int) -> Numbers:
        t, rate = step + 1, rate_at(self.learning_rate, step)
        beta1, slow = momentum_at(self.beta1, step), self.momentum_decay
        product = mu_product(self.beta1, slow, t)
        mu, following = _mu(beta1, slow, t), _mu(beta1, slow, t + 1)
        return rounded(
            rate * following / (1 - product * following),
            rate * (1 - mu) / (1 - product),
            rate * self.weight_decay,
            1 - beta1,
            1 - self.beta2,
            1 / sqrt(1 - self.beta2**t),
            self.epsilon,
        )

    @staticmethod
    def formula(w: Any, g: Any, m: Any, v: Any, *numbers: Any) -> tuple[Any, ...]:
        of_momentum, of_gradient, decay, share1, share2, correction, epsilon = numbers
        m = approach(m, g, share1)
        v = approach(v, g * g, share2)
        step = (of_momentum * m + of_gradient * g) / (np.sqrt(v) * correction + epsilon)
        return w - decay * w - step, m, v


def _mu(beta1: float, slow: float, t: int) -> float:
    return float(beta1 * (1 - 0.5 * 0.96 ** (t * slow)))


@lru_cache(maxsize=64)
def _products(beta1: Any, slow: float) -> list[float]:
    """Return the known products of NAdam's first mu(t)."""
    return [1.0]


def mu_product(beta1: Any, slow: float, t: int) -> float:
    """Return mu(1) * ... * mu(t), or 0 if it is below 1e-20."""
    found = _products(beta1, slow)
    while (known := len(found)) <= t and found[-1] > 1e-20:
        product = found[known - 1] * _mu(momentum_at(beta1, known - 1), slow, known)
        found[known : known + 1] = [product]  # another thread may have the same one
    return found[t] if t < len(found) else 0.0


@dataclass(frozen=True, slots=True)
class RAdam(Moments):
    """Adam that rectifies the variance of its first steps (Liu et al., arXiv:1908.03265).

    With m and v the slots of these names, 0 at first, t = step + 1, r = 2 / (1 - beta2) - 1 and
    s = r - 2 * t * beta2^t / (1 - beta2^t):

        m += (1 - beta1) * (g - m)
        v += (1 - beta2) * (g^2 - v)
        w -= lr * weight_decay * w
        w -= lr * m / (1 - beta1^t) * f         with f = 1 if s <= 5, else
            sqrt((s - 4) * (s - 2) * r / ((r - 4) * (r - 2) * s)) * sqrt(1 - beta2^t)
            / (sqrt(v) + epsilon)

    It is torch.optim.RAdam with ``decoupled_weight_decay``, and its defaults.
    """

    weight_decay: NonNegative = 0.0

    def hyperparameters(self, step: int) -> Numbers:
        t, rate, beta1 = step + 1, rate_at(self.learning_rate, step), momentum_at(self.beta1, step)
        length, correction = rate / (1 - beta1**t), 1 - self.beta2**t
        most = 2 / (1 - self.beta2) - 1
        s = most - 2 * t * self.beta2**t / correction
        plain, adaptive = length, 0.0
        if s > 5:
            rectified = (s - 4) * (s - 2) * most / ((most - 4) * (most - 2) * s)
            plain, adaptive = 0.0, length * sqrt(rectified * correction)
        shares = 1 - beta1, 1 - self.beta2
        return rounded(plain, adaptive, rate * self.weight_decay, *shares, self.epsilon)

    @staticmethod
    def formula(w: Any, g: Any, m: Any, v: Any, *numbers: Any) -> tuple[Any, ...]:
        plain, adaptive, decay, share1, share2, epsilon = numbers
        m = approach(m, g, share1)
        v = approach(v, g * g, share2)
        return w - decay * w - m * (plain + adaptive / (np.sqrt(v) + epsilon)), m, v


@dataclass(frozen=True, slots=True)
class Adamax(Moments):
    """Adam with the greatest gradient in place of the root (Kingma and Ba, arXiv:1412.6980).

    With m and u the slots of these names, 0 at first, and t = step + 1:

        m += (1 - beta1) * (g - m)
        u = max(beta2 * u, |g| + epsilon)
        w -= lr / (1 - beta1^t) * m / u

    It is torch.optim.Adamax, and its defaults. Keras adds its epsilon of 1e-7 to u in the last line
    instead: ``epsilon_in_max=False``.
    """

    zero_slots = ("m", "u")
    learning_rate: Rate = 0.002
    epsilon_in_max: bool = True

    def hyperparameters(self, step: int) -> Numbers:
        beta1 = momentum_at(self.beta1, step)
        alpha = rate_at(self.learning_rate, step) / (1 - beta1 ** (step + 1))
        epsilons = (self.epsilon, 0.0) if self.epsilon_in_max else (0.0, self.epsilon)
        return rounded(alpha, 1 - beta1, self.beta2, *epsilons)

    @staticmethod
    def formula(w: Any, g: Any, m: Any, u: Any, *numbers: Any) -> tuple[Any, ...]:
        alpha, share1, beta2, inner, outer = numbers
        m = approach(m, g, share1)
        u = np.maximum(beta2 * u, np.abs(g) + inner)
        return w - alpha * m / (u + outer), m, u


@dataclass(frozen=True, slots=True)
class LAMB(Moments, LayerRule):
    """AdamW whose step is as long as the variable, for large batches (You et al., 2019).

    With m and v the slots of these names, 0 at first, t = step + 1, and || || the Euclidean norm
    over a variable:

        m += (1 - beta1) * (g - m)
        v += (1 - beta2) * (g^2 - v)
        u = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + epsilon) + weight_decay * w
        w -= lr * ||w|| / ||u|| * u

    This is Algorithm 2 of arXiv:1904.00962 with phi(x) = x; the ratio is 1 where a norm is 0, as in
    the authors' code.
    """

    epsilon: Positive = 1e-6
    weight_decay: NonNegative = 0.01

    def hyperparameters(self, step: int) -> Numbers:
        t, beta1 = step + 1, momentum_at(self.beta1, step)
        return rounded(
            1 - beta1,
            1 - self.beta2,
            1 / (1 - beta1**t),
            1 / sqrt(1 - self.beta2**t),
            self.epsilon,
            self.weight_decay,
        )

    def factor(self, squares: tuple[float, float], size: int, step: int) -> np.float32:
        of_parameters, of_direction = map(sqrt, squares)
        ratio = of_parameters / of_direction if of_parameters and of_direction else 1.0
        return np.float32(rate_at(self.learning_rate, step) * ratio)

    @staticmethod
    def formula(w: Any, g: Any, m: Any, v: Any, *numbers: Any) -> tuple[Any, ...]:
        share1, share2, correction1, correction2, epsilon, decay = numbers
        m = approach(m, g, share1)
        v = approach(v, g * g, share2)
        return m * correction1 / (np.sqrt(v) * correction2 + epsilon) + decay * w, m, v
