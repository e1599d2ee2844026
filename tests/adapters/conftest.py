"""Fixtures for tests of several adapters."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from zmqtrain.compute.threads import limit_threads, usable_cores


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Limit linear algebra to one thread: with another number a framework may give other bits."""
    limit_threads(1)
    yield
    limit_threads(usable_cores())
