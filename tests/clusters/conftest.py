"""A stand-in for the engines' programs, and a home of its own for what is submitted."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.clusters.examples import JOB, ROOT
from tests.golden import Snapshot
from tests.leader import leader
from tests.transcript import performed
from zmqtrain.cli import keys as keys_command
from zmqtrain.clusters.submitted import submitted_jobs

__all__ = ["leader"]

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
        calls = [(words[1:], text) for words, text in map(json.loads, lines)]
        return [(words, text) for words, text in calls if verb in words]

    def taken(self) -> list[str]:
        """Return the calls as command lines, and forget them."""
        lines = (self.directory / "calls").read_text().splitlines()
        (self.directory / "calls").write_text("")
        return [" ".join(json.loads(line)[0]) for line in lines]


@pytest.fixture
def kubectl(tempdir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kubectl:
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


Step = str | tuple[Answer, ...] | Callable[[], object]
"""A command, what the stand-ins answer from now on, or something else that happens."""

Play = Callable[..., None]


@pytest.fixture
def play(
    kubectl: Kubectl,
    snapshot: Snapshot,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Play:
    """Returns a function that plays a scene, and compares its transcript with the snapshot.

    It has each command with the calls of the engine's programs (>), what it writes, and its exit
    code, and at the end the jobs that are known.
    """
    shown: list[str] = []
    waits = SimpleNamespace(sleep=lambda seconds: shown.append(f"(waits for {seconds:g} s)"))
    monkeypatch.setattr(keys_command, "time", waits)

    def perform(step: Step) -> None:
        if isinstance(step, tuple):
            kubectl.answers(*step)
        elif callable(step):
            step()
        else:
            told = performed(capsys, step.replace("JOB", str(ROOT / JOB)))
            command, _, rest = told.partition("\n")
            shown.extend([command, *(f"> {call}" for call in kubectl.taken()), rest])

    def play(*steps: Step) -> None:
        for step in steps:
            perform(step)
        for job in submitted_jobs():
            size = f"{job.ps} ps, {job.workers} of {job.max_workers} workers"
            shown.append(f"{job.name}: {job.kind} at {job.context}/{job.namespace}, {size}")
        text = re.sub(r"-L 127\.0\.0\.1:\d+", "-L PORT", "\n".join(shown))
        labels = "app.kubernetes.io/name=zmqtrain,app.kubernetes.io/instance="
        snapshot(text.replace(str(ROOT), "ROOT").replace(labels, "LABELS OF "), "submit")

    return play
