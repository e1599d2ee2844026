"""Variables that honcho gives its children, and the tasks named on its command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from zmqtrain.config.resolvers.honcho import honcho_counts, process_of, running_counts
from zmqtrain.errors import ConfigError

PYTHON = "/venv/bin/python3"
HONCHO = "/venv/bin/honcho"
TYPES = ("ps", "chief", "worker")


@pytest.mark.parametrize(
    ("argv", "counts"),
    [
        ([HONCHO, "start"], {"ps": 1, "chief": 1, "worker": 1}),
        (["honcho", "start"], {"ps": 1, "chief": 1, "worker": 1}),
        ([PYTHON, HONCHO, "start"], {"ps": 1, "chief": 1, "worker": 1}),
        ([PYTHON, "-m", "honcho", "start"], {"ps": 1, "chief": 1, "worker": 1}),
        ([HONCHO, "start", "-c", "ps=2,worker=4"], {"ps": 2, "chief": 1, "worker": 4}),
        ([HONCHO, "start", "-cworker=4"], {"ps": 1, "chief": 1, "worker": 4}),
        ([HONCHO, "start", "--concurrency=worker=4"], {"ps": 1, "chief": 1, "worker": 4}),
        ([HONCHO, "start", "--conc", "worker=4"], {"ps": 1, "chief": 1, "worker": 4}),
        ([HONCHO, "start", "-c", "chief=0"], {"ps": 1, "chief": 0, "worker": 1}),
        ([HONCHO, "start", "-c", "worker=4,worker=2"], {"ps": 1, "chief": 1, "worker": 2}),
        ([HONCHO, "start", "-c", "ps=2", "-c", "worker=3"], {"ps": 1, "chief": 1, "worker": 3}),
        ([HONCHO, "start", "-c", "other=3"], {"ps": 1, "chief": 1, "worker": 1}),
        ([HONCHO, "start", "worker"], {"worker": 1}),
        ([HONCHO, "start", "-c", "ps=2,worker=3", "ps", "chief"], {"ps": 2, "chief": 1}),
        ([HONCHO, "start", "ps", "-c", "ps=2"], {"ps": 2}),
        (
            [HONCHO, "-e", ".env", "-d", "app", "start", "-f", "P", "-p", "7000", "-q", "ps"],
            {"ps": 1, "chief": 1, "worker": 1},
        ),
        ([HONCHO, "--no-colour", "start", "--no-prefix", "ps"], {"ps": 1}),
    ],
)
def test_counts_follow_the_command_line(argv: list[str], counts: dict[str, int]) -> None:
    assert honcho_counts(argv, TYPES) == counts


@pytest.mark.parametrize(
    "argv", [["bash", "-c", "honcho start"], [HONCHO, "run", "worker"], [HONCHO], []]
)
def test_other_command_lines_are_refused(argv: list[str]) -> None:
    with pytest.raises(ConfigError):
        honcho_counts(argv, TYPES)


@pytest.mark.parametrize(
    ("name", "process"),
    [
        ("worker.2", ("worker", 1)),
        ("my-worker.10", ("my-worker", 9)),
        ("worker", None),
        ("worker.0", None),
        ("worker.x", None),
        (".1", None),
        ("", None),
    ],
)
def test_process_name_is_counted_from_1(name: str, process: tuple[str, int] | None) -> None:
    assert process_of({"HONCHO_PROCESS_NAME": name}) == process


class Ancestor:
    """A process above this one, as psutil shows it."""

    def __init__(self, cwd: Path, *argv: str, error: psutil.Error | None = None) -> None:
        self._cwd, self._argv, self._error = cwd, argv, error

    def cmdline(self) -> list[str]:
        if self._error:
            raise self._error
        return list(self._argv)

    def cwd(self) -> str:
        return str(self._cwd)


def above(monkeypatch: pytest.MonkeyPatch, *ancestors: Ancestor) -> None:
    monkeypatch.setattr(psutil.Process, "parents", lambda self: list(ancestors))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "Procfile").write_text("ps: run ps\nworker: run worker\n# chief: later\n")
    (tmp_path / "Other").write_text("chief: run chief\n")
    return tmp_path


def test_nearest_honcho_above_is_asked(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    above(
        monkeypatch,
        Ancestor(directory, "sh", "-c", "exec worker"),
        Ancestor(directory, error=psutil.AccessDenied()),
        Ancestor(directory, PYTHON, HONCHO, "start", "-c", "worker=3"),
        Ancestor(directory, PYTHON, HONCHO, "start", "-c", "worker=9"),
    )
    assert running_counts({}) == {"ps": 1, "worker": 3}


@pytest.mark.parametrize(
    ("arguments", "environ"),
    [(["-f", "Other"], {}), ([], {"PROCFILE": "Other"}), (["-d", ".", "-f", "Other"], {})],
)
def test_procfile_is_the_one_honcho_reads(
    monkeypatch: pytest.MonkeyPatch, directory: Path, arguments: list[str], environ: dict[str, str]
) -> None:
    above(monkeypatch, Ancestor(directory, HONCHO, "start", *arguments))
    assert running_counts(environ) == {"chief": 1}


def test_unreadable_procfile_leaves_the_counts_unknown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    above(monkeypatch, Ancestor(tmp_path, HONCHO, "start"))
    assert running_counts({}) is None


@pytest.mark.integration
def test_child_of_a_real_honcho_learns_the_counts(tmp_path: Path) -> None:
    (tmp_path / "ask.py").write_text(
        "import os; from zmqtrain.config.resolvers import honcho; "
        "print(honcho.running_counts(os.environ))"
    )
    (tmp_path / "Procfile").write_text(f"ps: {sys.executable} ask.py\nworker: sleep 60\n")
    done = subprocess.run(
        [sys.executable, "-m", "honcho", "start", "-c", "ps=1,worker=3"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "{'ps': 1, 'worker': 3}" in done.stdout
