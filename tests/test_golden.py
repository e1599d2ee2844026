"""The texts in tests/snapshots are those of tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.golden import SNAPSHOTS, read, write


@pytest.mark.parametrize("path", sorted(SNAPSHOTS.iterdir()), ids=lambda path: str(path.name))
def test_every_snapshot_belongs_to_a_test(path: Path) -> None:
    sources = "".join(each.read_text() for each in Path(__file__).parent.rglob("test_*.py"))
    tests = set(re.findall(r"def (test_\w+)", sources))
    assert [name for name in read(path) if name.partition("[")[0] not in tests] == []


def test_sections_are_read_as_they_were_written(tmp_path: Path) -> None:
    sections = {"test_b[1]": ["", "=== a", "  b", ""], "test_a": []}
    write(tmp_path / "a.txt", sections)
    assert read(tmp_path / "a.txt") == sections
