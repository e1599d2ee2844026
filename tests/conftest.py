"""What holds for every test."""

from __future__ import annotations

import os

import pytest

from zmqtrain.optim.kernels import cpu

compiled_elsewhere = cpu._compiled


def pytest_configure(config: pytest.Config) -> None:
    """Keep compiled kernels with what pytest caches: tests write nothing to the user's home."""
    os.environ["XDG_CACHE_HOME"] = str(config.rootpath / ".pytest_cache" / "xdg")
    cpu._compiled = compiled_here


def compiled_here(symbol: str) -> bytes:
    """Compile a kernel in this process: not each of dozens is to wait for Numba's import."""
    from zmqtrain.optim.kernels import compiler

    return compiler.code_of(symbol)
