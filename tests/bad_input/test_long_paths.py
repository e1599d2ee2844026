"""Paths that are too long for what they are for."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.bad_input.parts import make_job
from zmqtrain.errors import ConfigError
from zmqtrain.local.processes import LocalCluster, run_processes


async def test_temporary_directory_too_long_for_sockets_is_named(
    tmp_path: Path, move_tempdir: Callable[[Path], None]
) -> None:
    deep = tmp_path / ("x" * 90)
    deep.mkdir()
    move_tempdir(deep)
    text = f"{deep} is too long a path for Unix sockets; set TMPDIR to a shorter one"
    with pytest.raises(ConfigError, match=f"^{re.escape(text)}$"):
        await run_processes(
            "job.py", make_job(), LocalCluster(), [], lambda _: None, lambda *_: None
        )
    assert list(deep.iterdir()) == []
