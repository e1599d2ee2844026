"""Update rules, with TensorFlow 1's formulas and defaults.

In the formulas w is a parameter, g its gradient, lr the learning rate at this step; an assignment
uses the values that the lines before it left. Gradients are only read. Arithmetic is float32;
``hyperparameters(step)`` are the numbers of the update that follows ``step`` others, rounded to
float32, in the order in which the rule's fused kernel takes them. The sources are TensorFlow's
``core/kernels/training_ops.cc`` and ``python/training``; where Keras computes something else, the
class says how to have that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt

import numpy as np

from zmqtrain.compute.arrays import Flat
from zmqtrain.errors import ConfigError
from zmqtrain.optim.base import Slot
from zmqtrain.optim.blocks import approach, blocks, root
from zmqtrain.optim.checks import (
    check_decay,
    check_non_negative,
    check_non_positive,
    check_positive,
)
from zmqtrain.optim.schedules import Schedule, check_learning_rate, rate_at


@dataclass(frozen=True, slots=True)
class SGD:
    """Gradient descent: w -= lr * g.

    TensorFlow 1 has no default learning rate; this one is Keras's.
    """

    learning_rate: float | Schedule = 0.01

    def __post_init__(self) -> None:
        check_learning_rate(self.learning_rate)

    @property
    def slots(self) -> tuple[Slot, ...]:
        return ()

    def hyperparameters(self, step: int) -> tuple[np.float32, ...]:
        return _rounded(rate_at(self.learning_rate, step))

    def update(
        self, parameters: Flat, gradient: Flat, slots: Mapping[str, Flat], step: int
    ) -> None:
        (rate,) = self.hyperparameters(step)
        for w, g, _, (x,) in blocks(parameters, gradient, slots, scratch=1):
            np.multiply(g, rate, out=x)
            w -= x


@dataclass(frozen=True, slots=True)
class Momentum:
    """Gradient descent with momentum, plain or Nesterov's (Sutskever et al., ICML 2013).

    With a the slot "momentum", 0 at first:

        a = momentum * a + g
        w -= lr * a                         w -= lr * (g + momentum * a)    if ``nesterov``

    ``scaled_velocity`` gives Keras's form, whose slot holds steps instead of gradients, so that a
    change of the learning rate does not act on past ones:

        a = momentum * a - lr * g
        w += a                              w += momentum * a - lr * g      if ``nesterov``
    """

    learning_rate: float | Schedule
    momentum: float = 0.9
    nesterov: bool = False
    scaled_velocity: bool = False

    def __post_init__(self) -> None:
        check_learning_rate(self.learning_rate)
        check_decay(self, "momentum")

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("momentum", 0.0),)

    def hyperparameters(self, step: int) -> tuple[np.float32, ...]:
        return _rounded(rate_at(self.learning_rate, step), self.momentum)

    def update(
        self, parameters: Flat, gradient: Flat, slots: Mapping[str, Flat], step: int
    ) -> None:
        rate, momentum = self.hyperparameters(step)
        apply = self._apply_velocity if self.scaled_velocity else self._apply_gradients
        for w, g, state, (x,) in blocks(parameters, gradient, slots, scratch=1):
            apply(w, g, state["momentum"], x, rate, momentum)

    def _apply_gradients(
        self, w: Flat, g: Flat, a: Flat, x: Flat, rate: np.float32, momentum: np.float32
    ) -> None:
        a *= momentum
        a += g
        if self.nesterov:
            np.multiply(a, momentum, out=x)
            x += g
            x *= rate
        else:
            np.multiply(a, rate, out=x)
        w -= x

    def _apply_velocity(
        self, w: Flat, g: Flat, a: Flat, x: Flat, rate: np.float32, momentum: np.float32
    ) -> None:
        np.multiply(g, rate, out=x)
        a *= momentum
        a -= x
        if self.nesterov:
            w -= x
            np.multiply(a, momentum, out=x)
            w += x
        else:
            w += a


@dataclass(frozen=True, slots=True)
class Adagrad:
    """Steps divided by the root of the sum of squared gradients (Duchi et al., JMLR 2011).

    With a the slot "accumulator", ``initial_accumulator`` at first:

        a += g^2
        w -= lr * g / (sqrt(a) + epsilon)   w -= lr * g / sqrt(a + epsilon)
                                            if ``epsilon_inside_sqrt``

    TensorFlow 1 has no epsilon. Keras has 1e-7, and since 2.11 inside the root.
    """

    learning_rate: float | Schedule
    initial_accumulator: float = 0.1
    epsilon: float = 0.0
    epsilon_inside_sqrt: bool = False

    def __post_init__(self) -> None:
        check_learning_rate(self.learning_rate)
        check_non_negative(self, "initial_accumulator", "epsilon")
        if not self.epsilon:  # a gradient of 0 would give 0/0
            check_positive(self, "initial_accumulator")

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("accumulator", self.initial_accumulator),)

    def hyperparameters(self, step: int) -> tuple[np.float32, ...]:
        inner, outer = _epsilons(self.epsilon, self.epsilon_inside_sqrt)
        return _rounded(rate_at(self.learning_rate, step), inner, outer)

    def update(
        self, parameters: Flat, gradient: Flat, slots: Mapping[str, Flat], step: int
    ) -> None:
        rate, inner, outer = self.hyperparameters(step)
        for w, g, state, (x,) in blocks(parameters, gradient, slots, scratch=1):
            a = state["accumulator"]
            np.multiply(g, g, out=x)
            a += x
            root(a, inner, outer, out=x)
            np.divide(g, x, out=x)
            x *= rate
            w -= x


@dataclass(frozen=True, slots=True)
class RMSProp:
    """Steps divided by the root of a moving mean of squared gradients (Tieleman and Hinton, 2012).

    With s the slot "mean_square", ``initial_mean_square`` at first, and a the slot "momentum",
    0 at first:

        s += (1 - rho) * (g^2 - s)
        a = momentum * a + lr * g / sqrt(s + epsilon)
        w -= a

    ``centered`` adds the slot "mean_gradient" m, 0 at first, and divides by the deviation instead
    (Graves, arXiv:1308.0850): m += (1 - rho) * (g - m), and s - m^2 in place of s under the root.
    That difference is never below 0 but for rounding; where rounding takes it there it counts as 0
    (TensorFlow then gives NaN). Without momentum there is no slot for it.

    Keras starts s at 0 with epsilon 1e-7, and before 2.11, without momentum, it adds epsilon to
    the root: ``epsilon_inside_sqrt=False``.
    """

    learning_rate: float | Schedule
    rho: float = 0.9
    momentum: float = 0.0
    epsilon: float = 1e-10
    centered: bool = False
    initial_mean_square: float = 1.0
    epsilon_inside_sqrt: bool = True

    def __post_init__(self) -> None:
        check_learning_rate(self.learning_rate)
        check_decay(self, "rho", "momentum")
        check_positive(self, "epsilon")
        check_non_negative(self, "initial_mean_square")

    @property
    def slots(self) -> tuple[Slot, ...]:
        names = ["mean_gradient"] * self.centered + ["momentum"] * bool(self.momentum)
        return (
            Slot("mean_square", self.initial_mean_square),
            *(Slot(name, 0.0) for name in names),
        )

    def hyperparameters(self, step: int) -> tuple[np.float32, ...]:
        inner, outer = _epsilons(self.epsilon, self.epsilon_inside_sqrt)
        rate = rate_at(self.learning_rate, step)
        return _rounded(rate, 1 - self.rho, self.momentum, inner, outer)

    def update(
        self, parameters: Flat, gradient: Flat, slots: Mapping[str, Flat], step: int
    ) -> None:
        rate, share, momentum, inner, outer = self.hyperparameters(step)
        for w, g, state, (x,) in blocks(parameters, gradient, slots, scratch=1):
            square = self._mean_square(g, state, share, x)
            root(square, inner, outer, out=x)
            np.divide(g, x, out=x)
            x *= rate
            if self.momentum:
                a = state["momentum"]
                a *= momentum
                a += x
                x = a
            w -= x

    def _mean_square(self, g: Flat, state: Mapping[str, Flat], share: np.float32, x: Flat) -> Flat:
        """Take ``g`` into the moving means; return the slot, or, centered, the variance in x."""
        square = state["mean_square"]
        np.multiply(g, g, out=x)
        approach(square, x, share, scratch=x)
        if not self.centered:
            return square
        mean = state["mean_gradient"]
        approach(mean, g, share, scratch=x)
        np.multiply(mean, mean, out=x)
        np.subtract(square, x, out=x)
        return np.maximum(x, np.float32(0), out=x)


@dataclass(frozen=True, slots=True)
class Adam:
    """Adam (Kingma and Ba, arXiv:1412.6980), in the form with "epsilon hat" of its section 2.

    With m and v the slots of these names, 0 at first, and t = step + 1:

        alpha = lr * sqrt(1 - beta2^t) / (1 - beta1^t)
        m += (1 - beta1) * (g - m)
        v += (1 - beta2) * (g^2 - v)
        w -= alpha * m / (sqrt(v) + epsilon)

    ``nesterov`` puts beta1 * m + (1 - beta1) * g in place of m in the last line. The epsilon of the
    paper's Algorithm 1 is epsilon / sqrt(1 - beta2^t). Keras differs in the default 1e-7 only.
    """

    learning_rate: float | Schedule = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    nesterov: bool = False

    def __post_init__(self) -> None:
        check_learning_rate(self.learning_rate)
        check_decay(self, "beta1", "beta2")
        check_positive(self, "epsilon")

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("m", 0.0), Slot("v", 0.0))

    def hyperparameters(self, step: int) -> tuple[np.float32, ...]:
        t = step + 1
        correction = sqrt(1 - self.beta2**t) / (1 - self.beta1**t)
        alpha = rate_at(self.learning_rate, step) * correction
        return _rounded(alpha, self.beta1, 1 - self.beta1, 1 - self.beta2, self.epsilon)

    def update(
        self, parameters: Flat, gradient: Flat, slots: Mapping[str, Flat], step: int
    ) -> None:
        alpha, beta1, share1, share2, epsilon = self.hyperparameters(step)
        for w, g, state, (x, y) in blocks(parameters, gradient, slots, scratch=2):
            m, v = state["m"], state["v"]
            approach(m, g, share1, scratch=x)
            np.multiply(g, g, out=x)
            approach(v, x, share2, scratch=x)
            if self.nesterov:
                np.multiply(m, beta1, out=y)
                np.multiply(g, share1, out=x)
                y += x
                y *= alpha
            else:
                np.multiply(m, alpha, out=y)
            np.sqrt(v, out=x)
            x += epsilon
            y /= x
            w -= y


@dataclass(frozen=True, slots=True)
class Ftrl:
    """FTRL-Proximal (McMahan et al., "Ad Click Prediction", KDD 2013): exact zeros by ``l1``.

    With p = -``learning_rate_power``, n the slot "accumulator", ``initial_accumulator`` at first,
    and z the slot "linear", 0 at first:

        n' = n + g^2
        z += g + 2 * l2_shrinkage * w - (n'^p - n^p) / lr * w
        w = 0 where |z| <= l1, else (sign(z) * l1 - z) / (n'^p / lr + 2 * l2 + beta / lr)
        n = n'

    w is assigned, not moved: the first update forgets the initial parameters, and an element
    whose gradients have all been 0 becomes 0. TensorFlow 1 has no ``beta``; Keras has, and adds
    beta / (2 lr) to l2, which is the same. The learning rate must stay above 0.
    """

    learning_rate: float | Schedule
    learning_rate_power: float = -0.5
    initial_accumulator: float = 0.1
    l1: float = 0.0
    l2: float = 0.0
    l2_shrinkage: float = 0.0
    beta: float = 0.0

    def __post_init__(self) -> None:
        check_learning_rate(self.learning_rate)
        check_non_positive(self, "learning_rate_power")
        check_non_negative(self, "initial_accumulator", "l1", "l2", "l2_shrinkage", "beta")
        if not (self.l2 or self.beta):  # a gradient of 0 would give 0/0
            check_positive(self, "initial_accumulator")

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("accumulator", self.initial_accumulator), Slot("linear", 0.0))

    def hyperparameters(self, step: int) -> tuple[np.float32, ...]:
        rate = rate_at(self.learning_rate, step)
        if rate == 0:
            raise ConfigError(
                f"Ftrl: the learning rate is 0 at step {step}; expected one above 0, since the "
                f"rule divides by it; correct {self.learning_rate!r} in the job"
            )
        ridge = 2 * self.l2 + self.beta / rate
        return _rounded(1 / rate, ridge, 2 * self.l2_shrinkage, self.l1)

    def update(
        self, parameters: Flat, gradient: Flat, slots: Mapping[str, Flat], step: int
    ) -> None:
        per_rate, ridge, shrinkage, l1 = self.hyperparameters(step)
        for w, g, state, (x, y) in blocks(parameters, gradient, slots, scratch=2):
            n, z = state["accumulator"], state["linear"]
            self._power(n, out=x)
            np.multiply(g, g, out=y)
            n += y
            self._power(n, out=y)
            np.subtract(y, x, out=x)
            x *= per_rate
            if shrinkage:
                x -= shrinkage
            x *= w
            z += g
            z -= x
            y *= per_rate
            y += ridge
            # clip(z) - z is sign(z) * l1 - z beyond l1 and exactly 0 within.
            np.clip(z, -l1, l1, out=x)
            x -= z
            np.divide(x, y, out=w)

    def _power(self, n: Flat, out: Flat) -> None:
        if self.learning_rate_power == -0.5:
            np.sqrt(n, out=out)
        else:
            np.power(n, np.float32(-self.learning_rate_power), out=out)


def _rounded(*values: float) -> tuple[np.float32, ...]:
    return tuple(map(np.float32, values))


def _epsilons(epsilon: float, inside: bool) -> tuple[float, float]:
    """Return what is added under the root and what to it."""
    return (epsilon, 0.0) if inside else (0.0, epsilon)
