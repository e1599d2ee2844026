"""Checks of hyperparameters, made when the job is loaded.

The type of a field says what is checked: ``beta1: Decay`` is a number of at least 0 and below 1.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, partial
from math import isfinite
from numbers import Real
from typing import Annotated, Any, Self, TypeAlias, TypeGuard

from zmqtrain.errors import ConfigError
from zmqtrain.hints import no_option


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
check_decay = partial(_check, lambda value: 0 <= value < 1, "a number of at least 0 and below 1")
_check_non_positive = partial(_check, lambda value: value <= 0, "a finite number of at most 0")
_check_steps = partial(_check, lambda value: value >= 1, "a number of steps, at least 1")
_check_share = partial(_check, lambda value: 0 <= value <= 1, "a number from 0 to 1")

Positive: TypeAlias = Annotated[float, check_positive]
NonNegative: TypeAlias = Annotated[float, check_non_negative]
NonPositive: TypeAlias = Annotated[float, _check_non_positive]
Steps: TypeAlias = Annotated[int, _check_steps]
Share: TypeAlias = Annotated[float, _check_share]
Ratio: TypeAlias = Annotated[float, check_positive, _check_share]
Decay: TypeAlias = Annotated[float, check_decay]


def _check_switch(owner: object, name: str) -> None:
    """Raise ConfigError unless this attribute of ``owner`` is True or False."""
    if not isinstance(value := getattr(owner, name), bool):
        raise ConfigError(
            f"{type(owner).__name__}: {name} is {value!r}; expected a bool; correct "
            f"{name} in the job"
        )


class Checked:
    """A dataclass whose fields are checked by their types, one by one in their order.

    Raises:
        ConfigError: a field has an impossible value, or there is no option of a name.
    """

    __slots__ = ()

    def __new__(cls, *arguments: object, **options: object) -> Self:
        known = inspect.signature(cls.__init__).parameters  # of the dataclass, once it is one
        if unknown := [name for name in options if name not in known]:
            raise no_option(cls.__name__, unknown[0], list(known)[1:])
        return super().__new__(cls)

    def __post_init__(self) -> None:
        kind: Any = type(self)
        for name, check in _checks_of(kind):
            check(self, name)


@cache
def _checks_of(kind: Any) -> list[tuple[str, Callable[[object, str], None]]]:
    """Return the checks of a class's fields. Fields of others' subclasses are left to them."""
    types: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith("zmqtrain.optim."):
            types |= inspect.get_annotations(base, eval_str=True)
    return [(name, check) for name, of in types.items() for check in _checks_in(of)]


def _checks_in(of: Any) -> tuple[Callable[[object, str], None], ...]:
    return (_check_switch,) if of is bool else getattr(of, "__metadata__", ())
