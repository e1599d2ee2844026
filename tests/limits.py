"""Waits that end."""

from __future__ import annotations

import asyncio
from functools import partial

within = partial(asyncio.wait_for, timeout=10)
"""Awaits with a limit, so that a test that would hang fails."""
