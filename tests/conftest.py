"""What holds for every test."""

from __future__ import annotations

import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Keep compiled kernels with what pytest caches: tests write nothing to the user's home."""
    os.environ["XDG_CACHE_HOME"] = str(config.rootpath / ".pytest_cache" / "xdg")
