"""Checks of hyperparameters, made when the job is loaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import isfinite
from numbers import Real
from typing import TypeGuard

from zmqtrain.errors import ConfigError


def is_number(value: object) -> TypeGuard[float]:
    """Return whether ``value`` is a finite number; True and False are not."""
    if type(value) is float:  # as most are; Real costs a microsecond
        return isfinite(value)
    return not isinstance(value, bool) and isinstance(value, Real) and isfinite(value)


def _check(holds: Callable[[float], bool], expected: str, owner: object, *names: str) -> None:
    """Raise ConfigError unless these attributes of ``owner`` are finite and ``holds`` of each."""
    for name in names:
        value = getattr(owner, name)
        if not is_number(value) or not holds(value):
            raise ConfigError(
                f"{type(owner).__name__}: {name} is {value!r}; expected {expected}; "
                f"correct {name} in the job"
            )


check_positive = partial(_check, lambda value: value > 0, "a finite number above 0")
check_non_negative = partial(_check, lambda value: value >= 0, "a finite number of at least 0")
check_non_positive = partial(_check, lambda value: value <= 0, "a finite number of at most 0")
check_steps = partial(_check, lambda value: value >= 1, "a number of steps, at least 1")
check_share = partial(_check, lambda value: 0 <= value <= 1, "a number from 0 to 1")
check_decay = partial(_check, lambda value: 0 <= value < 1, "a number of at least 0 and below 1")


def check_switch(owner: object, *names: str) -> None:
    """Raise ConfigError unless these attributes of ``owner`` are True or False."""
    for name in names:
        if not isinstance(value := getattr(owner, name), bool):
            raise ConfigError(
                f"{type(owner).__name__}: {name} is {value!r}; expected a bool; correct "
                f"{name} in the job"
            )
