"""Learning rates that change with the step.

The formulas are TensorFlow 1's (``tf.train.exponential_decay`` and its neighbours), in Keras
``tf.keras.optimizers.schedules``. s is the step (0 at the first update), D is ``decay_steps``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, is_dataclass
from itertools import pairwise
from math import ceil, cos, exp, floor, inf, pi
from typing import Annotated, Any, Protocol, TypeAlias, runtime_checkable

from zmqtrain.errors import ConfigError
from zmqtrain.optim.checks import (
    Checked,
    NonNegative,
    Positive,
    Ratio,
    Share,
    Steps,
    check_decay,
    is_number,
)
from zmqtrain.user_code import user_code


@runtime_checkable
class Schedule(Protocol):
    """A learning rate for each step: a pure function, equal on every ps.

    Its ``repr``, part of the job's fingerprint, must be the same in every process.
    """

    def __call__(self, step: int, /) -> float:
        """Return the learning rate of the update that follows ``step`` others."""


@dataclass(frozen=True, slots=True)
class _Decay(Checked):
    """A rate that falls with s/D; with ``staircase``, with floor(s/D)."""

    initial: NonNegative
    decay_steps: Steps
    decay_rate: NonNegative
    staircase: bool = False

    def __post_init__(self) -> None:
        kind, steps, rate = type(self).__name__, self.decay_steps, self.decay_rate
        if is_number(steps) and is_number(rate) and 0 < steps < 1 < rate:
            raise ConfigError(
                f"{kind}: decay_steps is {steps!r}; expected it before decay_rate, as in {kind}"
                f"({self.initial!r}, {rate!r}, {steps!r}); correct decay_steps in the job"
            )
        Checked.__post_init__(self)

    def _periods(self, step: int) -> float:
        periods = step / self.decay_steps
        return floor(periods) if self.staircase else periods


@dataclass(frozen=True, slots=True)
class Exponential(_Decay):
    """initial * decay_rate^(s/D); with ``staircase`` the exponent is floor(s/D)."""

    decay_rate: Ratio  # above 1 the rate would grow without end

    def __call__(self, step: int) -> float:
        return float(self.initial * self.decay_rate ** self._periods(step))


@dataclass(frozen=True, slots=True)
class NaturalExponential(_Decay):
    """initial * e^(-decay_rate * s/D); with ``staircase``, floor(s/D) in place of s/D."""

    def __call__(self, step: int) -> float:
        return self.initial * exp(-self.decay_rate * self._periods(step))


@dataclass(frozen=True, slots=True)
class InverseTime(_Decay):
    """initial / (1 + decay_rate * s/D); with ``staircase``, floor(s/D) in place of s/D."""

    def __call__(self, step: int) -> float:
        return self.initial / (1 + self.decay_rate * self._periods(step))


@dataclass(frozen=True, slots=True)
class Piecewise:
    """values[0] while s <= boundaries[0], values[1] while s <= boundaries[1], at last values[-1].

    A boundary belongs to the interval before it. There is one value more than boundaries.
    """

    boundaries: Sequence[int]
    values: Sequence[float]

    def __post_init__(self) -> None:
        # As tuples, so that the schedule cannot change and has one repr.
        object.__setattr__(self, "boundaries", tuple(self.boundaries))
        object.__setattr__(self, "values", tuple(self.values))
        if len(self.values) != len(self.boundaries) + 1:
            raise ConfigError(
                f"Piecewise: {len(self.boundaries)} boundaries and {len(self.values)} values; "
                "expected one value more than boundaries; add or remove a value in the job"
            )
        if not all(is_number(step) and step >= 0 for step in self.boundaries):
            raise ConfigError(
                f"Piecewise: boundaries is {self.boundaries!r}; expected a sequence of steps, none "
                "below 0; correct boundaries in the job"
            )
        if any(low >= high for low, high in pairwise(self.boundaries)):
            raise ConfigError(
                f"Piecewise: boundaries is {self.boundaries!r}; expected increasing steps; "
                "correct boundaries in the job"
            )
        if not all(is_number(value) and value >= 0 for value in self.values):
            raise ConfigError(
                f"Piecewise: values is {self.values!r}; expected finite numbers of at least 0; "
                "correct values in the job"
            )

    def __call__(self, step: int) -> float:
        return float(self.values[bisect_left(self.boundaries, step)])


@dataclass(frozen=True, slots=True)
class Polynomial(Checked):
    """(initial - end) * (1 - min(s, D)/D)^power + end: from ``initial`` to ``end`` in D steps.

    With ``cycle`` it rises again after each D steps: D is replaced by D * ceil(s/D), by D at s = 0.
    """

    initial: NonNegative
    decay_steps: Steps
    end: NonNegative = 1e-4
    power: Positive = 1.0
    cycle: bool = False

    def __call__(self, step: int) -> float:
        steps = self.decay_steps
        if self.cycle:
            steps *= max(1, ceil(step / steps))
        remaining = 1 - min(step, steps) / steps
        return float((self.initial - self.end) * remaining**self.power + self.end)


@dataclass(frozen=True, slots=True)
class Cosine(Checked):
    """initial * ((1 - alpha) * (1 + cos(pi * min(s, D)/D)) / 2 + alpha).

    Half a cosine wave from ``initial`` to ``alpha * initial`` in D steps (Loshchilov and Hutter,
    "SGDR: Stochastic Gradient Descent with Warm Restarts", 2017; here without restarts).
    """

    initial: NonNegative
    decay_steps: Steps
    alpha: Share = 0.0

    def __call__(self, step: int) -> float:
        done = min(step, self.decay_steps) / self.decay_steps
        return self.initial * ((1 - self.alpha) * 0.5 * (1 + cos(pi * done)) + self.alpha)


@dataclass(frozen=True, slots=True)
class Function:
    """A function of the step as a schedule; its repr shows some rates, since it has no other text.

    It must be pure: every task calls it for the steps that it needs, in any order. Its result may
    be a scalar array of a framework.
    """

    function: Callable[[int], Any]
    name: str = "Function"

    def __call__(self, step: int) -> Any:
        with user_code(f"the rate of step {step}", self.function):
            rate = self.function(step)
            return rate.item() if hasattr(rate, "item") else rate

    def __repr__(self) -> str:
        text = f"{self.name}("
        with suppress(ConfigError, TypeError, ValueError):  # a table may end
            for step in (0, 1, 10, 100, 1000):
                text += f"{step}: {self(step):.6g}, "
        return f"{text.removesuffix(', ')})"


def _as_schedule(value: Any) -> Any:
    """Return a schedule with a repr that is the same in every process; numbers as they are.

    Raises:
        ConfigError: it gives another rate when it is called again.
    """
    if not callable(value) or isinstance(value, type) or " at 0x" not in repr(value):
        return value
    schedule = Function(value)
    if repr(schedule) != repr(schedule):
        raise ConfigError(
            f"the schedule {value!r} gives other rates when it is called again; expected a pure "
            "function of the step"
        )
    return schedule


def _check_rate(owner: object, name: str) -> None:
    object.__setattr__(owner, name, rate := _as_schedule(getattr(owner, name)))
    check_learning_rate(rate)


Rate: TypeAlias = Annotated[float | Schedule, _check_rate]
"""The type of a rule's learning rate. A function of the step becomes a :class:`Function`."""


@dataclass(frozen=True, slots=True)
class Warmup(Checked):
    """start + (r(0) - start) * s/D while s < D = ``steps``, then r(s - D), with r the ``rate``."""

    rate: Rate
    steps: Steps
    start: NonNegative = 0.0

    def __call__(self, step: int) -> float:
        if step >= self.steps:
            return rate_at(self.rate, step - self.steps)
        return self.start + (rate_at(self.rate, 0) - self.start) * step / self.steps


def _check_coefficient(owner: object, name: str) -> None:
    object.__setattr__(owner, name, value := _as_schedule(getattr(owner, name)))
    if not callable(value) or isinstance(value, type):
        check_decay(owner, name)


Coefficient: TypeAlias = Annotated[float | Schedule, _check_coefficient]
"""The type of a momentum that may follow a schedule, as in torch's OneCycleLR."""


def momentum_at(value: float | Schedule, step: int) -> float:
    """Return a momentum at this step; errors are those of :func:`rate_at`."""
    return rate_at(value, step, "momentum", below=1)


@dataclass
class Replaceable:
    """A learning rate that another one replaces, while ``replacement()`` is not None."""

    learning_rate: float | Schedule
    replacement: Callable[[], float | None] = field(repr=False)

    def __call__(self, step: int) -> float:
        rate = self.replacement()
        return rate_at(self.learning_rate if rate is None else rate, step)


def has_rate(optimizer: object) -> bool:
    """Return whether this optimizer's learning rate can be replaced."""
    return is_dataclass(optimizer) and hasattr(optimizer, "learning_rate")


def check_learning_rate(learning_rate: float | Schedule) -> None:
    """Check a rule's learning rate when the rule is made.

    Raises:
        ConfigError: it is neither a schedule nor a finite number of at least 0.
    """
    is_schedule = callable(learning_rate) and not isinstance(learning_rate, type)
    if not is_schedule and not (is_number(learning_rate) and learning_rate >= 0):
        raise ConfigError(
            f"the learning rate is {learning_rate!r}; expected a schedule or a finite number of at "
            "least 0; correct learning_rate in the job"
        )


def rate_at(
    rate: float | Schedule, step: int, what: str = "learning rate", below: float = inf
) -> float:
    """Return the learning rate, or another number, of the update that follows ``step`` others.

    Raises:
        ConfigError: the schedule returns something else than a finite number from 0 to ``below``.
    """
    found = rate(step) if callable(rate) else rate
    if not is_number(found) or not 0 <= found < below:
        limit = "" if below == inf else f" and below {below}"
        raise ConfigError(
            f"the {what} is {found!r} at step {step}; expected a finite number of at least 0"
            f"{limit}; correct {rate!r} in the job"
        )
    return found
