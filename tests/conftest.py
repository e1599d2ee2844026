"""Fixtures for tests of several folders: real processes, and logging as it was before."""

from __future__ import annotations

import gc
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.clock import Clock, StopClock
from tests.constants import constants
from tests.golden import RENEW, Snapshot
from tests.harness import stage
from tests.modules import modules
from zmqtrain.compute.threads import usable_cores

__all__ = ["constants", "modules", "stage"]

settings.register_profile("machines differ", deadline=None)
settings.load_profile("machines differ")


@pytest.fixture(autouse=True)
def same_logging() -> Iterator[None]:
    """Give the process its logging back: a command that a test calls sets up its own."""
    root = logging.getLogger()
    handlers, levels = list(root.handlers), _log_levels()
    yield
    root.handlers[:] = handlers
    for logger, level in _log_levels().items():
        if level != levels.get(logger, logging.NOTSET):
            logger.setLevel(levels.get(logger, logging.NOTSET))


def _log_levels() -> dict[logging.Logger, int]:
    """Return the level of each logger of zmqtrain, and of the root."""
    named = logging.root.manager.loggerDict.items()
    own = [logger for name, logger in named if name.startswith("zmqtrain")]
    return {each: each.level for each in (logging.root, *own) if isinstance(each, logging.Logger)}


def pytest_configure(config: pytest.Config) -> None:
    """Let tests share what XLA has compiled, in a directory for each process that runs tests.

    Most of a test with JAX would otherwise compile the functions of tests before it again. And let
    nothing wait for the disk: no test cuts the power.
    """
    os.fsync = os.fstat  # type: ignore[assignment]
    if hasattr(config, "cache"):
        process = os.environ.get("PYTEST_XDIST_WORKER", "gw0")
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(config.cache.mkdir(f"jax-{process}"))
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")


def pytest_xdist_auto_num_workers() -> int:
    """Return half again as many processes as there are cores: some tests wait for real time."""
    return usable_cores() * 3 // 2


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Spare the collection and each test the cost of what stays in memory.

    The garbage collector would look at a million objects of imported frameworks, and pytest would
    add its handlers to the 60 loggers of PyTorch that do not propagate, three times a test.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        for logger in logging.root.manager.loggerDict.values():
            if isinstance(logger, logging.Logger):
                logger.propagate = True


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(RENEW, action="store_true", help="write tests/snapshots as the texts are now")


@pytest.fixture
def move_tempdir(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | Path], None]:
    """Put temporary files of this process into another directory."""
    return lambda path: monkeypatch.setattr(tempfile, "tempdir", str(path))


@pytest.fixture
def tempdir(tmp_path: Path, move_tempdir: Callable[[Path], None]) -> Path:
    """The test's directory, which has the temporary files of this process, too."""
    move_tempdir(tmp_path)
    return tmp_path


@pytest.fixture
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def stop_clock(monkeypatch: pytest.MonkeyPatch) -> StopClock:
    """Give modules, each by a call, a clock that stands still."""

    def stop(module: Any) -> Clock:
        clock = Clock()
        monkeypatch.setattr(module, "time", clock)
        return clock

    return stop


@pytest.fixture
def snapshot(request: pytest.FixtureRequest) -> Snapshot:
    return Snapshot(request)
