"""Callbacks of an event loop, which only logs the errors they raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVarTuple

Arguments = TypeVarTuple("Arguments")


def guarded(
    call: Callable[[*Arguments], object], on_error: Callable[[Exception], None]
) -> Callable[[*Arguments], None]:
    """Wrap ``call`` so that its errors go to ``on_error``."""

    def guard(*arguments: *Arguments) -> None:
        try:
            call(*arguments)
        except Exception as error:
            on_error(error)

    return guard
