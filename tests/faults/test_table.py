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


def test_every_fault_has_a_test() -> None:
    rows = re.findall(r"^\| (.+?) \| (.*) \|$", TABLE, re.MULTILINE)
    faults = [row for row in rows if row not in (("fault", "tests"), ("---", "---"))]
    assert faults
    assert [fault for fault, tests in faults if not re.search(r"`test_\w+\.py`", tests)] == []
