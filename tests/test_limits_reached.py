"""Limits of a process end it with a sentence and exit code 2, not with a traceback."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from typing import Any

import click
import pytest

from zmqtrain.config.commands import invoke
from zmqtrain.config.restarts import SUPERVISED_SINCE, supervised_since
from zmqtrain.errors import ConfigError, ExitCode
from zmqtrain.hints import host_error
from zmqtrain.roles.launch import exit_code_of


def of_a_library() -> Exception:
    """Return how a package tells that its library could not be loaded."""
    error = OSError("Could not find/load shared object file")
    error.__context__ = OSError("libllvmlite.so: failed to map segment from shared object")
    return error


LIMITS = {
    "memory": (MemoryError(), "ulimit -v"),
    "an array": (MemoryError("Unable to allocate 4.00 EiB"), "Unable to allocate 4.00 EiB: "),
    "a thread": (RuntimeError("can't start new thread"), "ulimit -u"),
    "a fork": (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "ulimit -u"),
    "a fork's memory": (OSError(errno.ENOMEM, "Cannot allocate memory"), "ulimit -v"),
    "files": (OSError(errno.EMFILE, "Too many open files"), "ulimit -n"),
    "files of the host": (OSError(errno.ENFILE, "Too many open files"), "fs.file-max"),
    "an import": (ImportError("x.so: failed to map segment from shared object"), "ulimit -v"),
    "an import of an import": (of_a_library(), "ulimit -v"),
}
BUGS = (RuntimeError("no"), ValueError("no"), OSError(errno.ENOENT, "no"), ImportError("no"))


def raising(error: Exception) -> Callable[[], int]:
    def run() -> int:
        raise error

    return run


@pytest.mark.parametrize(("error", "told"), LIMITS.values(), ids=LIMITS)
def test_limit_ends_a_command_with_a_sentence(
    error: Exception, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = click.Command("any", callback=raising(error))
    assert invoke(command, "any", []) == ExitCode.USAGE
    said = capsys.readouterr().err
    assert said.startswith("error: ") and told in said and "raise the limit" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(("error", "told"), LIMITS.values(), ids=LIMITS)
def test_limit_ends_a_task_with_a_sentence(
    error: Exception, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert exit_code_of(raising(error)) == ExitCode.USAGE
    (record,) = caplog.records
    assert told in record.getMessage() and record.exc_info is None


@pytest.mark.parametrize("error", BUGS, ids=repr)
def test_error_of_another_cause_keeps_its_traceback(error: Exception) -> None:
    assert host_error(error) is None
    with pytest.raises(type(error)):
        invoke(click.Command("any", callback=raising(error)), "any", [])


@pytest.mark.parametrize("text", ["x", "nan", "1e", "2026-11-25", "0x10"])
def test_supervisors_time_that_is_no_number_is_a_mistake(text: str) -> None:
    with pytest.raises(ConfigError, match=f"SINCE is '{text}'; expected a Unix time"):
        supervised_since({SUPERVISED_SINCE: text})


@pytest.mark.parametrize(
    ("environ", "since"),
    [({}, float("inf")), ({SUPERVISED_SINCE: " "}, float("inf")), ({SUPERVISED_SINCE: "3.5"}, 3.5)],
)
def test_supervisors_time_is_read(environ: dict[str, Any], since: float) -> None:
    assert supervised_since(environ) == since
