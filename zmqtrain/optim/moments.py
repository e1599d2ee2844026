"""Rules with a mean of gradients and a measure of their size: Adam and its descendants.

The notation is that of rules.py; the sources are the papers.
"""

from __future__ import annotations

from dataclasses import dataclass
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
    """What Adam and its descendants have in common: slots "m" and "v", 0 at first."""

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
class LAMB(Moments, LayerRule):
    """AdamW whose step is as long as the variable, for large batches (You et al., 2019).

    With m and v the slots of these names, 0 at first, t = step + 1, and || || the Euclidean norm
    over a variable:

        m += (1 - beta1) * (g - m)
        v += (1 - beta2) * (g^2 - v)
        u = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + epsilon) + weight_decay * w
        w -= lr * ||w|| / ||u|| * u

    This is Algorithm 2 of arXiv:1904.00962 with phi(x) = x; the ratio is 1 where a norm is 0, as in
    the authors' code. A ps takes the norms over what it holds of a variable: if a variable is cut
    over several ps, each part has its own ratio, and the result depends a little on how many ps
    there are.
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
