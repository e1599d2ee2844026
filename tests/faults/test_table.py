"""The table of faults names tests that are there, and leaves out none of this folder."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
TABLE = (HERE / "README.md").read_text()


def test_table_of_faults_names_every_test_of_faults_and_none_that_is_gone() -> None:
    named = set(re.findall(r"`(test_\w+\.py)`", TABLE))
    assert named <= {path.name for path in HERE.parent.rglob("test_*.py")}
    assert {path.name for path in HERE.glob("test_*.py")} - {Path(__file__).name} <= named


def test_table_has_a_row_of_tests_for_each_of_33_faults() -> None:
    rows = re.findall(r"^\| (\d+) \| .+ \| .*`.+` \|$", TABLE, re.MULTILINE)
    assert [int(number) for number in rows] == list(range(1, 34))
