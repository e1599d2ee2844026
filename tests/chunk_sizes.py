"""Chunks of a few elements, so that small arrays have several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from zmqtrain.wire import chunks


@contextmanager
def chunks_of(size: int) -> Iterator[None]:
    """Have chunks hold ``size`` elements of 4 bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK_SIZE", size)
        yield
