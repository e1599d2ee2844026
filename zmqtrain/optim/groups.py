"""Options of some variables, by patterns of their names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from zmqtrain.errors import ConfigError
from zmqtrain.hints import did_you_mean
from zmqtrain.units import shortened

Pattern: TypeAlias = str | tuple[str, ...]
Groups: TypeAlias = Mapping[Pattern, Mapping[str, Any]]

_EXPECTED = 'expected options by patterns of names, such as {"*.bias": {"weight_decay": 0.0}}'


def fits(name: str, pattern: Pattern) -> bool:
    """Return whether a variable's name fits a pattern, or one of a tuple of patterns."""
    patterns = (pattern,) if isinstance(pattern, str) else pattern
    return any(fnmatchcase(name, each) for each in patterns)


def is_pattern(value: object) -> bool:
    """Return whether this is a pattern of names, or a tuple of patterns."""
    return isinstance(value, str | tuple) and all(isinstance(each, str) for each in value)


def check_groups(groups: object) -> None:
    """
    Raises:
        ConfigError: these are not options by patterns of names.
    """
    if not isinstance(groups, Mapping):
        raise ConfigError(f"groups is {groups!r:.80}; {_EXPECTED}")
    for pattern, options in groups.items():
        if not is_pattern(pattern) or not isinstance(options, Mapping):
            raise ConfigError(f"groups has {pattern!r}: {options!r:.80}; {_EXPECTED}")


def check_patterns(
    option: str, patterns: Iterable[Pattern], names: Iterable[str], model: Any
) -> None:
    """Check that each pattern is the first that fits for one of the ``names`` of ``model``.

    Raises:
        ConfigError: one fits no name, or those before it fit all of its names.
    """
    names, what = list(names), "table" if option == "tables" else "variable that is trained"
    left = names
    for pattern in patterns:
        fitting = [name for name in names if fits(name, pattern)]
        if not fitting:
            raise ConfigError(
                f"{option} has {pattern!r}, which fits no {what}; {model!r} has "
                f"{shortened(names) or 'none'}"
            )
        if not set(fitting).intersection(left):
            raise ConfigError(
                f"{option} has {pattern!r}, and patterns before it fit {shortened(fitting)}; the "
                "first that fits counts, so give this one before them, or leave it out"
            )
        left = [name for name in left if name not in fitting]


def with_options(rule: Any, pattern: Pattern, options: Mapping[str, Any]) -> tuple[Any, bool]:
    """Return the rule with the options of a group, and whether ``l2`` is one of the rule's own.

    Raises:
        ConfigError: the rule has no such option, or a value is wrong.
    """
    names = [each.name for each in fields(rule)] if is_dataclass(rule) else []
    for name in options:
        if name not in (known := [*names, "l2", "optimizer"]):
            raise ConfigError(
                f"groups gives {pattern!r} {name!r}, which is not an option of {rule!r}; expected "
                f"some of {', '.join(known)}{did_you_mean(name, known)}"
            )
    own = {name: value for name, value in options.items() if name in names}
    return replace(rule, **own) if own else rule, "l2" in own
