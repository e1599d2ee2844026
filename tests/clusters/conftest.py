"""A stand-in for the engines' programs, and a home of its own for what is submitted."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

Answer = tuple[list[str], int, str, str, bool]


@dataclass
class Kubectl:
    """The stand-in: see kubectl.py."""

    directory: Path

    def answers(self, *answers: Answer) -> None:
        (self.directory / "answers.json").write_text(json.dumps(answers))

    def calls(self, verb: str) -> list[tuple[list[str], str]]:
        """Return the words and the stdin of each call with this verb."""
        lines = (self.directory / "calls").read_text().splitlines()
        return [(words, text) for words, text in map(json.loads, lines) if verb in words]


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kubectl:
    directory = tmp_path / "programs"
    directory.mkdir()
    program = Path(__file__).with_name("kubectl.py").read_text()
    for name in ("kubectl", "ssh", "squeue", "sbatch", "scancel"):
        (directory / name).write_text(f"#!{sys.executable} -IS\n{program}")
        (directory / name).chmod(0o755)
    (directory / "calls").touch()
    monkeypatch.setenv("PATH", f"{directory}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in list(os.environ):
        if name.startswith("ZMQTRAIN_"):
            monkeypatch.delenv(name)
    return Kubectl(directory)


def said(text: str, *words: str) -> Answer:
    """Return an answer to calls with these words."""
    return [*words], 0, text, "", False


def given(value: Any, *words: str) -> Answer:
    return said(json.dumps(value), *words)


def refused(text: str, *words: str, once: bool = False) -> Answer:
    return [*words], 1, "", f"{text}\n", once
