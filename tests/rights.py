"""Tests of what a user may not do: root may do everything."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_NOBODY = 65534


@contextmanager
def no_root() -> Iterator[None]:
    """Have no more rights than any other user."""
    is_root = os.geteuid() == 0
    if is_root:
        os.setresuid(_NOBODY, _NOBODY, 0)
    try:
        yield
    finally:
        if is_root:
            os.setresuid(0, 0, 0)
