"""The command line as a whole: help, exit codes, and how errors are told."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import click
import pytest
from click.testing import CliRunner

from tests.constants import Constants
from tests.modules import Modules
from zmqtrain import __main__, __version__, errors
from zmqtrain.cli import main as module
from zmqtrain.cli.main import COMMANDS, FIRST_DAY, cli, main
from zmqtrain.errors import ExitCode, ZmqTrainError

ERRORS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, ZmqTrainError)
]


Fail = Callable[[BaseException], int]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_begins_with_two_examples_and_fits_a_screen(command: str) -> None:
    lines = CliRunner().invoke(cli, [command, "--help"]).output.splitlines()
    assert len(lines) <= 45
    examples = [line for line in lines[2:4] if re.match(" +(honcho|zmqtrain) ", line)]
    assert len(examples) == 2
    assert any(f"zmqtrain {command} " in f"{line} " for line in examples)


@pytest.mark.parametrize("command", ["run", "submit", "check"])
def test_full_help_has_every_option_of_a_job(command: str) -> None:
    short, full = (
        CliRunner().invoke(cli, [command, option]).output for option in ("--help", "--help-all")
    )
    assert "--policy" in short
    assert "--partition-nbytes" not in short
    assert "--partition-nbytes" in full
    assert "ZMQTRAIN_PARTITION_NBYTES" in full


def test_help_shows_the_commands_of_the_first_day_and_help_all_the_others() -> None:
    short, full = (
        CliRunner().invoke(cli, [option]).output.split("Commands:\n")[1].splitlines()
        for option in ("--help", "--help-all")
    )
    assert [line.split()[0] for line in short[: len(FIRST_DAY)]] == list(FIRST_DAY)
    assert [line.split()[0] for line in full] == list(COMMANDS)
    assert all(line.endswith(".") and not line.endswith("..") for line in full)


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == ExitCode.OK
    assert capsys.readouterr().out == f"zmqtrain {__version__}\n"


def test_command_imports_no_engine_before_it_asks_one() -> None:
    script = "import sys, zmqtrain.cli.status; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, stdout=subprocess.PIPE, text=True
    )
    imported = {name for name in done.stdout.split() if name.startswith("zmqtrain.clusters.")}
    assert imported == {"zmqtrain.clusters.engines", "zmqtrain.clusters.submitted"}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["stauts"], "No such command 'stauts'; did you mean status?"),
        (["policy"], "Missing argument 'SPEC'"),
        (["submit", "job.py"], "Missing option --on (or ZMQTRAIN_ON)"),
        (["status", "--timeout-s", "0"], "0.0 is not in the range x>0"),
        (["placement", "job.py", "--ps", "-1"], "-1 is not in the range x>=0"),
    ],
)
def test_wrong_usage_is_reported_and_exits_with_2(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == ExitCode.USAGE
    told = capsys.readouterr()
    assert complaint in told.err
    assert told.out == ""


NUMBERS = [
    "status --timeout-s",
    "why --timeout-s",
    "policy x --timeout-s",
    "policy x --wait-s",
    "save --timeout-s",
    "stop --timeout-s",
    "save --wait-s",
    "stop --wait-s",
    "chaos --timeout-s",
    "chaos --seconds",
    "top --timeout-s",
    "chaos --pause-s",
    "supervise --within-s",
]


@pytest.mark.parametrize("option", NUMBERS)
def test_number_that_is_not_finite_is_refused(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for text in ("nan", "-nan", "inf", "Infinity", "1e999"):
        assert main([*option.split(), text]) == ExitCode.USAGE
        assert f"{text!r} is not a finite number" in capsys.readouterr().err


@pytest.fixture
def fail(modules: Modules, constants: Constants) -> Fail:
    """Runs a command that raises an error."""

    def run(error: BaseException) -> int:
        def command() -> None:
            raise error

        modules("failing", SimpleNamespace(command=click.Command("fail", callback=command)))
        constants(module, COMMANDS={"fail": "failing:command"})
        return main(["fail"])

    return run


@pytest.mark.parametrize("kind", ERRORS)
def test_error_of_zmqtrain_is_one_line_and_its_exit_code(
    kind: Any, fail: Fail, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fail(kind("this went wrong")) == kind.exit_code
    assert capsys.readouterr().err == "error: this went wrong\n"


def test_bug_keeps_its_traceback(fail: Fail) -> None:
    with pytest.raises(ZeroDivisionError, match="a bug"):
        fail(ZeroDivisionError("a bug"))


def test_interrupt_exits_with_130(fail: Fail) -> None:
    assert fail(KeyboardInterrupt()) == ExitCode.INTERRUPTED


def test_interrupt_while_the_command_is_imported_exits_with_130(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "main", Mock(side_effect=KeyboardInterrupt))
    assert __main__.main() == ExitCode.INTERRUPTED
