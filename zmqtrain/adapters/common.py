"""Helpers of all adapters."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from zmqtrain.errors import ConfigError
from zmqtrain.store.weights import load


def name_of(function: Any) -> str:
    """Return a name without an address, so that all tasks have the same fingerprint."""
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__qualname__", type(function).__name__))


def options_of(kind: Any, given: Mapping[str, Any], ours: Mapping[str, str]) -> dict[str, Any]:
    """Return options of a framework that a dataclass has; ``ours``: its names where they differ."""
    named = {ours.get(name, name): value for name, value in given.items()}
    return {each.name: named[each.name] for each in fields(kind) if each.name in named}


def train_inside(optimizer: str) -> str:
    """Return the way out for an optimizer that no rule computes, as the end of a sentence."""
    return (
        f'train it inside local steps, by Job(inner={optimizer}, policy="local-steps:50"): see '
        "docs/slow_links.md"
    )


def check_build(build: Any, kind: type) -> None:
    """Raise ConfigError if ``build`` is not a function without arguments that can make a module."""
    expected = "expected a function that returns a new one at each call"
    if isinstance(build, kind):
        raise ConfigError(
            f"a {type(build).__name__} was given in place of build; {expected}, so that each "
            "worker has its own"
        )
    if not callable(build):
        raise ConfigError(f"build is {build!r:.80}; {expected}")
    check_takes(build, remedy="expected a build() without arguments, such as lambda: Net(10)")


def constant_loss(owner: object) -> ConfigError:
    """Return the error of a loss without any gradient."""
    return ConfigError(
        f"the loss of {owner!r} depends on no parameter that is trained; expected one that is "
        "computed from the outputs, without detach or stop_gradient"
    )


def check_takes(function: Any, *arguments: str, remedy: str = "") -> None:
    """Raise ConfigError if a function of the user cannot be called with these arguments in order.

    Built-in functions and None are not checked.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        call = f"{name_of(function)}({', '.join(signature.parameters)})"
        text = f"{call} is called with ({', '.join(arguments)}): {error}"
        raise ConfigError(f"{text}; {remedy}" if remedy else text) from None


def numbers_of(measures: Mapping[str, Any], owner: object) -> dict[str, float]:
    """Return measures of a batch as numbers.

    Raises:
        ConfigError: one is something else.
    """
    for name, value in measures.items():
        if shape := tuple(getattr(value, "shape", ())):
            raise ConfigError(
                f"the measure {name!r} of {owner!r} has the shape {shape}; expected a number: "
                "return its mean over the batch"
            )
    return {name: float(value) for name, value in measures.items()}


def weights_of(source: str | Path | Mapping[str, Any], *, average: bool) -> Mapping[str, Any]:
    """Return arrays by name: those of a logdir, or the given ones.

    ``average``: the moving averages of a logdir.

    Raises:
        CheckpointError: the logdir has no checkpoint, or no averages.
    """
    return source if isinstance(source, Mapping) else load(source, average=average)
