"""What tests of several folders use: real processes, and waits that end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import settings

from tests.harness import check_counts_fixture, stage

__all__ = ["check_counts_fixture", "stage"]

settings.register_profile("machines differ", deadline=None)
settings.load_profile("machines differ")


@pytest.fixture
def within() -> Callable[[Any], Any]:
    """Await with a limit, so that a test that would hang fails."""
    return partial(asyncio.wait_for, timeout=10)
