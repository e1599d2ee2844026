"""Numeric options: finite numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import click


class FiniteRange(click.FloatRange):
    """``click.FloatRange`` without NaN and infinity."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


def seconds_option(
    name: str, default: float, help: str, envvar: str | None = None
) -> Callable[[click.decorators.FC], click.decorators.FC]:
    """Return an option that takes a positive number of seconds."""
    return click.option(
        name,
        type=FiniteRange(0, min_open=True),
        default=default,
        metavar="NUMBER",
        show_default=True,
        envvar=envvar,
        show_envvar=True,
        help=help,
    )
