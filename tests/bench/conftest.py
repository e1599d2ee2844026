from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner, Result

from bench.__main__ import main


@pytest.fixture
def invoke() -> Callable[..., Result]:
    """Runs `python -m bench` with these arguments, in this process."""
    return _invoke


@pytest.fixture
def rows_of() -> Callable[..., list[dict[str, Any]]]:
    """Runs a benchmark that succeeds; returns its rows."""
    return _rows_of


@pytest.fixture
def refusal_of() -> Callable[..., str]:
    """Runs a benchmark that refuses its options; returns what it says of them, as one line."""
    return _refusal_of


def _invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def _rows_of(*arguments: str) -> list[dict[str, Any]]:
    result = _invoke(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def _refusal_of(*arguments: str) -> str:
    result = _invoke(*arguments)
    assert result.exit_code == 2, result.output
    return " ".join(result.stderr.replace("│", " ").split())
