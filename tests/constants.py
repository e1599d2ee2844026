"""Other constants for modules, so that a test waits for less or needs less data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Constants = Callable[..., None]


@pytest.fixture
def constants(monkeypatch: pytest.MonkeyPatch) -> Constants:
    """Give a module other constants, each by its name, until the test has ended."""

    def give(module: Any, **values: Any) -> None:
        for name, value in values.items():
            assert name.isupper(), f"{name} is no constant"
            monkeypatch.setattr(module, name, value)

    return give
