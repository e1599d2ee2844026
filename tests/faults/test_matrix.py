"""The table of faults is true: the tests that it names exist, and it leaves no row open."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.faults.matrix import INVARIANTS, NOT_THERE, ROWS, Row

HERE = Path(__file__).parent
TESTS = HERE.parent


@cache
def written_in(path: Path) -> list[str]:
    """Return the node ids of the tests of a file."""
    nodes = ast.parse(path.read_text()).body if path.is_file() else []
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    names = [node.name for node in nodes if isinstance(node, functions)]
    file = path.relative_to(TESTS)
    return [f"{file}::{name}" for name in names if name.startswith("test_")]


def named(prefix: str) -> list[str]:
    """Return the tests whose node ids begin so."""
    path = TESTS / prefix.partition("::")[0]
    return [test for test in written_in(path) if test.startswith(prefix)]


def test_rows_are_numbered_from_1_to_33_and_each_is_of_another_fault() -> None:
    assert [row.number for row in ROWS] == list(range(1, 34))
    assert len({row.fault for row in ROWS}) == 33
    assert len(INVARIANTS) == 7


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.number}")
def test_row_is_covered_by_tests_that_exist_or_says_what_it_needs(row: Row) -> None:
    assert [prefix for prefix in row.tests if len(named(prefix)) != 1] == []
    assert row.tests or row.missing
    assert row.missing == "" or row.missing.startswith(NOT_THERE)


@pytest.mark.parametrize("invariant", INVARIANTS)
def test_invariant_is_checked_by_tests_that_exist(invariant: str) -> None:
    prefixes = INVARIANTS[invariant].split()
    assert prefixes
    assert [prefix for prefix in prefixes if len(named(prefix)) != 1] == []


def test_every_test_of_faults_stands_in_some_row() -> None:
    covering = {test for row in ROWS for prefix in row.tests for test in named(prefix)}
    files = [path for path in HERE.glob("test_*.py") if path != Path(__file__)]
    assert {test for path in files for test in written_in(path)} - covering == set()
