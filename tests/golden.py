"""Texts for people that tests expect, in the files of tests/snapshots, one for each command."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest

SNAPSHOTS = Path(__file__).with_name("snapshots")
RENEW = "--renew-snapshots"
_HEADING = re.compile(r"^=== (.+) ===\n", re.MULTILINE)


class Snapshot:
    """The text that a test expects: a section of a file, under the test's name."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._renew: bool = request.config.getoption(RENEW)
        self._test: str = request.node.name
        self._command = request.path.stem.removeprefix("test_").removesuffix("_command")
        self._tmp_path = str(request.getfixturevalue("tmp_path"))

    def __call__(self, text: str, command: str = "") -> None:
        """Compare a text with the section in the file of ``command``, or of the test's module."""
        path = SNAPSHOTS / f"{command or self._command}.txt"
        lines = [line.rstrip() for line in text.replace(self._tmp_path, "TMP").splitlines()]
        sections = read(path)
        held = sections.get(self._test, [])
        if self._renew:
            write(path, sections | {self._test: lines})
        elif lines != held:
            changes = "\n".join(difflib.unified_diff(held, lines, path.name, "now", lineterm=""))
            pytest.fail(f"{changes}\npytest {RENEW} writes {path.name} anew", pytrace=False)


def read(path: Path) -> dict[str, list[str]]:
    """Return the lines of each section of a file by the name of its test."""
    _, *parts = _HEADING.split(path.read_text() if path.exists() else "")
    texts = zip(parts[::2], parts[1::2], strict=True)
    return {name: text.removesuffix("\n").splitlines() for name, text in texts}


def write(path: Path, sections: dict[str, list[str]]) -> None:
    """Write a file that :func:`read` reads."""
    path.parent.mkdir(exist_ok=True)
    texts = ("".join(f"{line}\n" for line in lines) for _, lines in sorted(sections.items()))
    headed = zip(sorted(sections), texts, strict=True)
    path.write_text("".join(f"=== {name} ===\n{text}\n" for name, text in headed))
