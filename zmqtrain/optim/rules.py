"""Update rules: those of TensorFlow 1, with its formulas and defaults, and newer ones.

In the docstrings w is a parameter, g its gradient, lr the learning rate at this step; an assignment
uses the values that the lines before it left. Gradients are only read. Arithmetic is float32, in
the order of ``formula``. The sources are TensorFlow's ``core/kernels/training_ops.cc`` and
``python/training``, and the papers from AdamW on. If Keras computes something else, the class says
how to get that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from zmqtrain.errors import ConfigError
from zmqtrain.optim.base import Slot
from zmqtrain.optim.checks import Decay, NonNegative, NonPositive, Positive, Share, check_positive
from zmqtrain.optim.formula import FormulaRule, Numbers, approach, rounded
from zmqtrain.optim.schedules import Coefficient, Rate, momentum_at, rate_at

_ZERO = np.float32(0)


@dataclass(frozen=True, slots=True)
class SGD(FormulaRule):
    """Gradient descent: w -= lr * g.

    TensorFlow 1 has no default learning rate; this one is Keras's.
    """

    learning_rate: Rate = 0.01

    def hyperparameters(self, step: int) -> Numbers:
        return rounded(rate_at(self.learning_rate, step))

    @staticmethod
    def formula(w: Any, g: Any, rate: Any) -> tuple[Any, ...]:
        return (w - rate * g,)


@dataclass(frozen=True, slots=True)
class Momentum(FormulaRule):
    """Gradient descent with momentum, plain or Nesterov's (Sutskever et al., ICML 2013).

    With a the slot "momentum", 0 at first:

        a = momentum * a + g
        w -= lr * a                         w -= lr * (g + momentum * a)    if ``nesterov``

    ``scaled_velocity`` gives Keras's form, whose slot holds steps instead of gradients, so that a
    change of the learning rate does not act on past ones:

        a = momentum * a - lr * g
        w += a                              w += momentum * a - lr * g      if ``nesterov``

    ``dampening`` is torch's: each g but the first counts 1 - dampening times in a.
    """

    zero_slots = ("momentum",)
    learning_rate: Rate
    momentum: Coefficient = 0.9
    nesterov: bool = False
    scaled_velocity: bool = False
    dampening: Share = 0.0

    def hyperparameters(self, step: int) -> Numbers:
        rate, momentum = rate_at(self.learning_rate, step), momentum_at(self.momentum, step)
        share = 1 - self.dampening if step else 1.0
        switches = bool(self.nesterov), bool(self.scaled_velocity), bool(self.dampening)
        return *rounded(rate, momentum, share), *switches

    @staticmethod
    def formula(w: Any, g: Any, a: Any, *numbers: Any) -> tuple[Any, ...]:
        rate, momentum, share, nesterov, scaled_velocity, is_damped = numbers
        if scaled_velocity:
            a = momentum * a - rate * g
            return (w - rate * g + momentum * a if nesterov else w + a), a
        a = momentum * a + (share * g if is_damped else g)
        return w - rate * (momentum * a + g if nesterov else a), a


@dataclass(frozen=True, slots=True)
class Adagrad(FormulaRule):
    """Steps divided by the root of the sum of squared gradients (Duchi et al., JMLR 2011).

    With a the slot "accumulator", ``initial_accumulator`` at first:

        a += g^2
        w -= lr * g / (sqrt(a) + epsilon)   w -= lr * g / sqrt(a + epsilon)
                                            if ``epsilon_inside_sqrt``

    TensorFlow 1 has no epsilon; Keras's is 1e-7, since 2.11 inside the root; see :meth:`torch`.
    """

    learning_rate: Rate
    initial_accumulator: NonNegative = 0.1
    epsilon: NonNegative = 0.0
    epsilon_inside_sqrt: bool = False

    def __post_init__(self) -> None:
        FormulaRule.__post_init__(self)
        if not self.epsilon:  # a gradient of 0 would give 0/0
            check_positive(self, "initial_accumulator")

    @classmethod
    def torch(cls, learning_rate: Rate = 0.01, **options: Any) -> Adagrad:
        """Return the rule of torch.optim.Adagrad, with its defaults."""
        return cls(learning_rate, **{"initial_accumulator": 0.0, "epsilon": 1e-10} | options)

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("accumulator", self.initial_accumulator),)

    def hyperparameters(self, step: int) -> Numbers:
        inner, outer = _epsilons(self.epsilon, self.epsilon_inside_sqrt)
        return rounded(rate_at(self.learning_rate, step), inner, outer)

    @staticmethod
    def formula(
        w: Any, g: Any, accumulator: Any, rate: Any, inner: Any, outer: Any
    ) -> tuple[Any, ...]:
        accumulator = accumulator + g * g
        return w - g / (np.sqrt(accumulator + inner) + outer) * rate, accumulator


@dataclass(frozen=True, slots=True)
class RMSProp(FormulaRule):
    """Steps divided by the root of a moving mean of squared gradients (Tieleman and Hinton, 2012).

    With s the slot "mean_square", ``initial_mean_square`` at first, and a the slot "momentum",
    0 at first:

        s += (1 - rho) * (g^2 - s)
        a = momentum * a + lr * g / sqrt(s + epsilon)
        w -= a

    ``centered`` adds the slot "mean_gradient" m, 0 at first, and divides by the deviation instead
    (Graves, arXiv:1308.0850): m += (1 - rho) * (g - m), and s - m^2 in place of s under the root.
    If rounding makes that difference negative, it counts as 0 (TensorFlow gives NaN). Without
    momentum there is no slot for it.

    Keras starts s at 0 with epsilon 1e-7, and before 2.11, without momentum, it adds epsilon to
    the root: ``epsilon_inside_sqrt=False``. PyTorch's defaults are those of :meth:`torch`; without
    ``scaled_velocity``, as there, lr is a factor of a in the last line instead of g.
    """

    learning_rate: Rate
    rho: Decay = 0.9
    momentum: Coefficient = 0.0
    epsilon: Positive = 1e-10
    centered: bool = False
    initial_mean_square: NonNegative = 1.0
    epsilon_inside_sqrt: bool = True
    scaled_velocity: bool = True

    @classmethod
    def torch(cls, learning_rate: Rate = 0.01, **options: Any) -> RMSProp:
        """Return the rule of torch.optim.RMSprop, with its defaults."""
        switches = {"epsilon_inside_sqrt": False, "scaled_velocity": False}
        numbers = {"rho": 0.99, "epsilon": 1e-8, "initial_mean_square": 0.0}
        return cls(learning_rate, **switches | numbers | options)

    @property
    def slots(self) -> tuple[Slot, ...]:
        names = ["mean_gradient"] * self.centered + ["momentum"] * bool(self.momentum)
        return (Slot("mean_square", self.initial_mean_square), *(Slot(name, 0.0) for name in names))

    @property
    def formula_slots(self) -> tuple[str | None, ...]:
        mean_gradient = "mean_gradient" if self.centered else None
        return "mean_square", mean_gradient, "momentum" if self.momentum else None

    def hyperparameters(self, step: int) -> Numbers:
        inner, outer = _epsilons(self.epsilon, self.epsilon_inside_sqrt)
        rate = rate_at(self.learning_rate, step)
        numbers = rate, 1 - self.rho, momentum_at(self.momentum, step), inner, outer
        return *rounded(*numbers), bool(self.scaled_velocity)

    @staticmethod
    def formula(
        w: Any, g: Any, mean_square: Any, mean_gradient: Any, momentum: Any, *numbers: Any
    ) -> tuple[Any, ...]:
        rate, share, decay, inner, outer, scaled_velocity = numbers
        mean_square = approach(mean_square, g * g, share)
        square = mean_square
        if mean_gradient is not None:
            mean_gradient = approach(mean_gradient, g, share)
            square = np.maximum(mean_square - mean_gradient * mean_gradient, _ZERO)
        descent = g / (np.sqrt(square + inner) + outer)
        descent = descent * rate if scaled_velocity else descent
        if momentum is not None:
            descent = decay * momentum + descent
            momentum = descent
        step = descent if scaled_velocity else rate * descent
        return w - step, mean_square, mean_gradient, momentum


@dataclass(frozen=True, slots=True)
class Ftrl(FormulaRule):
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

    learning_rate: Rate
    learning_rate_power: NonPositive = -0.5
    initial_accumulator: NonNegative = 0.1
    l1: NonNegative = 0.0
    l2: NonNegative = 0.0
    l2_shrinkage: NonNegative = 0.0
    beta: NonNegative = 0.0

    def __post_init__(self) -> None:
        FormulaRule.__post_init__(self)
        if not (self.l2 or self.beta):  # a gradient of 0 would give 0/0
            check_positive(self, "initial_accumulator")

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("accumulator", self.initial_accumulator), Slot("linear", 0.0))

    def hyperparameters(self, step: int) -> Numbers:
        rate = rate_at(self.learning_rate, step)
        if rate == 0:
            raise ConfigError(
                f"Ftrl: the learning rate is 0 at step {step}; expected one above 0, since the "
                f"rule divides by it; correct {self.learning_rate!r} in the job"
            )
        ridge = 2 * self.l2 + self.beta / rate
        power = -self.learning_rate_power
        numbers = rounded(1 / rate, ridge, 2 * self.l2_shrinkage, self.l1, power)
        return (*numbers, power == 0.5)

    @property
    def is_exact(self) -> bool:
        """NumPy's power is vectorised, that of compiled loops is not; roots are exact."""
        return self.learning_rate_power == -0.5

    @staticmethod
    def formula(w: Any, g: Any, n: Any, z: Any, *numbers: Any) -> tuple[Any, ...]:
        per_rate, ridge, shrinkage, l1, power, is_root = numbers
        square = n + g * g
        before = np.sqrt(n) if is_root else np.power(n, power)
        after = np.sqrt(square) if is_root else np.power(square, power)
        z = z + g - ((after - before) * per_rate - shrinkage) * w
        beyond = np.maximum(np.abs(z) - l1, _ZERO)
        return (_ZERO - np.sign(z) * beyond) / (after * per_rate + ridge), square, z


@dataclass(frozen=True, slots=True)
class Lion(FormulaRule):
    """Steps of one length, along the sign of a momentum (Chen et al., arXiv:2302.06675).

    With m the slot "m", 0 at first:

        w -= lr * (sign(beta1 * m + (1 - beta1) * g) + weight_decay * w)
        m += (1 - beta2) * (g - m)

    The paper takes a learning rate 3 to 10 times smaller than Adam's, and a decay that much larger.
    """

    zero_slots = ("m",)
    learning_rate: Rate = 0.0001
    beta1: Decay = 0.9
    beta2: Decay = 0.99
    weight_decay: NonNegative = 0.0

    def hyperparameters(self, step: int) -> Numbers:
        rate = rate_at(self.learning_rate, step)
        shares = self.beta1, 1 - self.beta1, 1 - self.beta2
        return rounded(rate, *shares, self.weight_decay)

    @staticmethod
    def formula(
        w: Any, g: Any, m: Any, rate: Any, beta1: Any, share1: Any, share2: Any, decay: Any
    ) -> tuple[Any, ...]:
        step = np.sign(beta1 * m + share1 * g) + decay * w
        return w - rate * step, approach(m, g, share2)


def _epsilons(epsilon: float, inside: bool) -> tuple[float, float]:
    """Return the epsilon under the root, and the one outside."""
    return (epsilon, 0.0) if inside else (0.0, epsilon)
