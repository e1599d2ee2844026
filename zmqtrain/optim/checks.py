"""Checks of hyperparameters, made when the job is loaded."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from numbers import Real
from typing import TypeGuard

from zmqtrain.errors import ConfigError


def check_positive(owner: object, *names: str) -> None:
    """Raise ConfigError unless these attributes of ``owner`` are finite and above 0."""
    _check(owner, names, lambda value: value > 0, "a finite number above 0")


def check_non_negative(owner: object, *names: str) -> None:
    """Raise ConfigError unless these attributes of ``owner`` are finite and at least 0."""
    _check(owner, names, lambda value: value >= 0, "a finite number of at least 0")


def check_non_positive(owner: object, *names: str) -> None:
    """Raise ConfigError unless these attributes of ``owner`` are finite and at most 0."""
    _check(owner, names, lambda value: value <= 0, "a finite number of at most 0")


def check_share(owner: object, *names: str) -> None:
    """Raise ConfigError unless these attributes of ``owner`` are between 0 and 1, ends included."""
    _check(owner, names, lambda value: 0 <= value <= 1, "a number from 0 to 1")


def check_decay(owner: object, *names: str) -> None:
    """Raise ConfigError unless these attributes of ``owner`` are at least 0 and below 1."""
    _check(owner, names, lambda value: 0 <= value < 1, "a number of at least 0 and below 1")


def is_number(value: object) -> TypeGuard[float]:
    """Return whether ``value`` is a finite number; True and False are not."""
    if type(value) is float:  # as most are; Real costs a microsecond
        return isfinite(value)
    return not isinstance(value, bool) and isinstance(value, Real) and isfinite(value)


def _check(
    owner: object, names: tuple[str, ...], holds: Callable[[float], bool], expected: str
) -> None:
    for name in names:
        value = getattr(owner, name)
        if not is_number(value) or not holds(value):
            raise ConfigError(
                f"{type(owner).__name__}: {name} is {value!r}; expected {expected}; "
                f"correct {name} in the job"
            )
