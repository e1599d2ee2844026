"""Modules that take the place of installed ones."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

Modules = Callable[[str, Any], None]


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Modules:
    """Give imports, each by a call, another module; None: it is not installed."""
    return lambda name, module: monkeypatch.setitem(sys.modules, name, module)
