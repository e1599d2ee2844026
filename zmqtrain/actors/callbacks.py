"""What an event loop calls by itself: it would only log what such a call raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVarTuple

Arguments = TypeVarTuple("Arguments")


def guarded(
    call: Callable[[*Arguments], object], on_error: Callable[[Exception], None]
) -> Callable[[*Arguments], None]:
    """Return ``call`` as something whose errors are given to ``on_error``."""

    def guard(*arguments: *Arguments) -> None:
        try:
            call(*arguments)
        except Exception as error:
            on_error(error)

    return guard
