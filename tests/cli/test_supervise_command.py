"""Command line of `zmqtrain supervise`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest

from zmqtrain.cli import supervise as module
from zmqtrain.cli.main import main
from zmqtrain.config.restarts import Limits
from zmqtrain.errors import ExitCode

Call = tuple[tuple[str, ...], Limits]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Calls of a supervisor that starts nothing and ends with 7."""
    found: list[Call] = []

    async def supervise(command: Sequence[str], limits: Limits) -> int:
        found.append((tuple(command), limits))
        return 7

    monkeypatch.setattr(module, "supervise", supervise)
    return found


@pytest.mark.parametrize(
    ("arguments", "variables", "call"),
    [
        ("-- ps --job j.py -- x", {}, (("ps", "--job", "j.py", "--", "x"), Limits(10, 600))),
        ("ps --within-s 3 --help", {}, (("ps", "--within-s", "3", "--help"), Limits(10, 600))),
        ("--max-restarts 0 --within-s 2.5 ps", {}, (("ps",), Limits(0, 2.5))),
        ("-- ps", {"ZMQTRAIN_MAX_RESTARTS": "3"}, (("ps",), Limits(3, 600))),
        (
            "--max-restarts 4 ps",
            {"ZMQTRAIN_MAX_RESTARTS": "3", "ZMQTRAIN_WITHIN_S": "60"},
            (("ps",), Limits(4, 60)),
        ),
    ],
)
def test_command_is_what_follows_the_supervisors_own_flags(
    calls: list[Call],
    monkeypatch: pytest.MonkeyPatch,
    arguments: str,
    variables: dict[str, str],
    call: Call,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["supervise", *arguments.split()]) == 7
    assert calls == [call]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("", "Missing argument '-- COMMAND...'"),
        ("--", "Missing argument '-- COMMAND...'"),
        ("--job j.py", "No such option"),
        ("--max-restarts -1 ps", "-1 is not in the range x>=0"),
        ("--max-restarts some ps", "'some' is not a valid integer"),
        ("--within-s 0 ps", "0.0 is not in the range x>0"),
    ],
)
def test_wrong_usage_starts_nothing(
    calls: list[Call], capsys: pytest.CaptureFixture[str], arguments: str, complaint: str
) -> None:
    assert main(["supervise", *arguments.split()]) == ExitCode.USAGE
    assert complaint in capsys.readouterr().err
    assert calls == []


def test_supervisor_brings_nothing_that_only_a_task_needs() -> None:
    script = "import sys, zmqtrain.cli.supervise; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=60
    )
    assert not {"numpy", "zmq", "pydantic", "rich"} & set(done.stdout.split())
