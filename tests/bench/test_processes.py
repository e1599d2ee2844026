"""Commands that print results, and what becomes of the processes that they start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from bench.output import ROOT
from bench.processes import LAST_LINES, RunError, json_lines_of
from tests.harness import until

TIMEOUT_S = 60.0

# Starts a process that leaves its parent's session, and tells its pid.
PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                         start_new_session=True)
with open(sys.argv[1] + ".new", "w") as file:
    file.write(str(child.pid))
os.replace(sys.argv[1] + ".new", sys.argv[1])
print('{"done": true}', flush=True)
"""

# Tells its pid, and of a SIGTERM, which it does not heed.
STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: open(sys.argv[2], "w").close())
with open(sys.argv[1] + ".new", "w") as file:
    file.write(str(os.getpid()))
os.replace(sys.argv[1] + ".new", sys.argv[1])
while True:
    time.sleep(600)
"""


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code, *arguments]


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_printed_objects_are_returned_and_other_lines_are_not() -> None:
    code = 'print("hello"); print(\'{"a": 1}\'); print(\'{"a": 2}\')'
    assert json_lines_of(python(code), timeout_s=TIMEOUT_S) == [{"a": 1}, {"a": 2}]


def test_command_runs_in_the_root_with_the_settings_given() -> None:
    code = 'import json, os; print(json.dumps({"s": os.environ["S"], "cwd": os.getcwd()}))'
    rows = json_lines_of(python(code), settings={"S": "x"}, timeout_s=TIMEOUT_S)
    assert rows == [{"s": "x", "cwd": str(ROOT)}]


def test_failure_is_told_with_the_end_of_what_was_said() -> None:
    code = 'import sys; print("line\\n" * 99 + "last words", file=sys.stderr); sys.exit(3)'
    with pytest.raises(RunError) as caught:
        json_lines_of(python(code), timeout_s=TIMEOUT_S)
    first, *rest = str(caught.value).splitlines()
    assert first == "ended with exit code 3"
    assert len(rest) == LAST_LINES and rest[-1] == "last words"


def test_run_without_results_is_a_failure() -> None:
    with pytest.raises(RunError, match="printed no result\nwhy"):
        json_lines_of(python('import sys; print("why", file=sys.stderr)'), timeout_s=TIMEOUT_S)


def test_command_that_cannot_be_started_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="absent"):
        json_lines_of([str(tmp_path / "absent")], timeout_s=TIMEOUT_S)


def test_what_a_command_leaves_behind_is_ended(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    json_lines_of(python(PARENT, str(path)), timeout_s=TIMEOUT_S)
    assert has_ended(int(path.read_text()))


@pytest.mark.parametrize("how", ["", "env -i"], ids=["marked", "without its environment"])
def test_command_over_its_time_is_ended_with_all_that_it_started(how: str, tmp_path: Path) -> None:
    path = tmp_path / "pid"
    shell = ["sh", "-c", f"{how} sleep 600 & echo $! > {path}; wait"]
    with pytest.raises(RunError, match="took over 2 s"):
        json_lines_of(shell, timeout_s=2.0)
    assert has_ended(int(path.read_text()))


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_processes_are_ended_when_the_benchmark_is_told_to_end_though_it_is_told_twice(
    first: signal.Signals, tmp_path: Path
) -> None:
    """They do not end before they are killed."""
    pid, told = tmp_path / "pid", tmp_path / "told"
    command = python(STUBBORN, str(pid), str(told))
    code = (
        "from bench import processes; processes.GRACE_S = 1.0; "
        f"processes.json_lines_of({command!r}, timeout_s=600)"
    )
    benchmark = subprocess.Popen(python(code), cwd=ROOT)
    for sign, number in ((pid, first), (told, signal.SIGTERM)):
        until(sign.exists, sign.name, str)
        benchmark.send_signal(number)
    assert benchmark.wait(TIMEOUT_S) == 128 + first
    assert has_ended(int(pid.read_text()))


def test_sigterm_means_afterwards_what_it_meant_before() -> None:
    before = signal.getsignal(signal.SIGTERM)
    json_lines_of(python("print('{}')"), timeout_s=TIMEOUT_S)
    assert signal.getsignal(signal.SIGTERM) is before
    assert "BENCH_RUNS" not in os.environ
