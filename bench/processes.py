"""Commands that print JSON lines: run under a time limit, and nothing of them outlives its run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import IO, Any, NoReturn

import psutil

from bench.output import ROOT
from zmqtrain.hosting.signals import restored, that_end

MARKS = "BENCH_RUNS"  # variable with the marks of the runs that a process belongs to
GRACE_S = 5.0  # how long what is left of a run may take to end
LAST_LINES = 12  # of stderr, that a failed run is reported with


class RunError(Exception):
    """A command failed or took too long; the text says how, with the end of its stderr.

    ``rows`` are the JSON objects that it had printed before.
    """

    def __init__(self, text: str, rows: Sequence[dict[str, Any]] = ()) -> None:
        super().__init__(text)
        self.rows = rows


def json_lines_of(
    command: Sequence[str], *, timeout_s: float, settings: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """Run a command in the project's root; return the JSON objects that it printed, one a line.

    ``settings`` are added to its environment. Whatever it started has ended on return, even if
    this process is told to end meanwhile.

    Raises:
        RunError: it ended with another exit code than 0, printed no JSON, or took too long.
    """
    mark = uuid.uuid4().hex
    marks = f"{os.environ.get(MARKS, '')} {mark}"
    # Files, not pipes: a pipe has no end while anything that the command started holds it.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **(settings or {}), MARKS: marks},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,  # Ctrl-C is for this process, which ends the run
            )
        except OSError as error:
            raise RunError(f"cannot be started: {error}") from error
        code = _exit_code(process, mark, timeout_s)
        lines = _text(output).splitlines(keepends=True)
        rows = [json.loads(line) for line in lines if line[0] == "{" and line[-1] == "\n"]
        if code != 0:
            how = f"took over {timeout_s:g} s" if code is None else f"ended with exit code {code}"
            raise RunError(f"{how}\n{_last_lines(errors)}", rows)
        if not rows:
            raise RunError(f"printed no result\n{_last_lines(errors)}")
        return rows


def _exit_code(process: subprocess.Popen[bytes], mark: str, timeout_s: float) -> int | None:
    """Wait for the end of a run, then end what is left of it. Returns None if it took too long."""
    with end_in_order():
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end_marked(mark)
            process.wait()


def _end_marked(mark: str) -> None:
    """End every process that has the mark in its environment, and their descendants.

    A child may have left its parent, or it may have written its title over its environment, as
    Ray's do; hence both ways to find it.
    """
    found: set[psutil.Process] = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if mark in process.environ().get(MARKS, ""):
                found |= {process, *process.children(recursive=True)}
    left = list(found)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        _, left = psutil.wait_procs(left, timeout=GRACE_S)


@contextmanager
def end_in_order() -> Iterator[None]:
    """Have the first signal raise SystemExit, so that what was made is removed."""
    with restored() as numbers:
        for number in numbers:
            signal.signal(number, _leave)
        yield


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """Raise SystemExit, and let no other signal disturb what follows from it."""
    for other in that_end():
        signal.signal(other, signal.SIG_IGN)
    sys.exit(128 + number)


def _last_lines(errors: IO[bytes]) -> str:
    return "\n".join(_text(errors).splitlines()[-LAST_LINES:])


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
