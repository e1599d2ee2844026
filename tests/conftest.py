"""What tests of several folders use: real processes, and logging as it was before."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.clock import Clock, StopClock
from tests.golden import RENEW, Snapshot
from tests.harness import stage

__all__ = ["stage"]

settings.register_profile("machines differ", deadline=None)
settings.load_profile("machines differ")


@pytest.fixture(autouse=True)
def same_logging() -> Iterator[None]:
    """Give the process its logging back: a command that a test calls sets up its own."""
    root = logging.getLogger()
    handlers, levels = list(root.handlers), {each: each.level for each in _loggers()}
    yield
    root.handlers[:] = handlers
    for each in _loggers():
        if each.level != (before := levels.get(each, logging.NOTSET)):
            each.setLevel(before)


def _loggers() -> list[logging.Logger]:
    known = logging.root.manager.loggerDict.values()
    return [logging.root, *(each for each in known if isinstance(each, logging.Logger))]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(RENEW, action="store_true", help="write tests/snapshots as the texts are now")


@pytest.fixture
def tempdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put temporary files of this process into the test's directory."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
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
