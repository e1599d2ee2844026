from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner

from bench.__main__ import main


@pytest.fixture
def rows_of() -> Callable[..., list[dict[str, Any]]]:
    """Runs `python -m bench` with these arguments, in this process; returns its rows."""

    def run(*arguments: str) -> list[dict[str, Any]]:
        result = CliRunner().invoke(main, [*arguments, "--json"])
        assert result.exit_code == 0, result.output
        return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]

    return run
